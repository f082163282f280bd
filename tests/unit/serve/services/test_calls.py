"""Calls to a service that takes none: it is the service's state, not the cluster's."""

from __future__ import annotations

import pytest

from aenv_ray.actors.ray_shell import ray_serve
from aenv_ray.errors import FabricUnavailable, ServiceUnavailable, is_infrastructure
from aenv_ray.serve.services.calls import ServiceCalls


async def test_a_service_that_is_not_deployed_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alert for a gateway that fails counts `fabric_unavailable`."""

    def app_handle(name: str) -> None:
        raise FabricUnavailable(f"there is no application {name}")

    monkeypatch.setattr(ray_serve, "app_handle", app_handle)
    with pytest.raises(ServiceUnavailable, match="is not deployed") as raised:
        await ServiceCalls().sandbox("weather", "")
    assert raised.value.code == "service_unavailable"
    assert is_infrastructure(raised.value), "as before"
