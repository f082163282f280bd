"""Calls to services whose replicas cannot be asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.ray_shell import ray_serve
from aenv_ray.errors import FabricUnavailable, SandboxLost, ServiceUnavailable, is_infrastructure
from aenv_ray.serve.services.calls import ServiceCalls, service_target
from aenv_ray.serve.services.service_replica import SERVICE_LABEL

NOTHING: Any = None


async def test_a_service_that_is_not_deployed_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the service's state, not the cluster's, whose alert counts `fabric_unavailable`."""

    def app_handle(name: str) -> None:
        raise FabricUnavailable(f"there is no application {name}")

    monkeypatch.setattr(ray_serve, "app_handle", app_handle)
    with pytest.raises(ServiceUnavailable, match="is not deployed") as raised:
        await ServiceCalls(NOTHING, NOTHING).sandbox("weather", "")
    assert raised.value.code == "service_unavailable"
    assert is_infrastructure(raised.value), "as before"


class Sandboxes:
    """The sandboxes of the cluster; one ends while it is asked."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, str]] = []

    async def list_instances(self) -> list[Any]:
        live = [("of-replica", "weather"), ("dying", "weather"), ("other", "news")]
        found = [
            SimpleNamespace(id=name, requested_id=None, labels={SERVICE_LABEL: service})
            for name, service in live
        ]
        pooled = SimpleNamespace(id="pooled", requested_id="draining", labels=found[0].labels)
        return [*found, pooled, SimpleNamespace(id="x", requested_id=None, labels={})]

    async def cancel(self, instance_id: str, name: str) -> None:
        if instance_id == "dying":
            raise SandboxLost("it died", instance_id=instance_id)
        self.cancelled.append((instance_id, name))


@pytest.mark.parametrize("replicas", ["answer", "do not answer", "are all being stopped"])
async def test_a_cancellation_reaches_sandboxes_of_replicas_that_are_being_stopped(
    monkeypatch: pytest.MonkeyPatch, replicas: str
) -> None:
    """Invariant 11: Serve asks only the others, and the calls of those run on."""
    failures = {
        "do not answer": FabricUnavailable("no answer"),
        "are all being stopped": ServiceUnavailable("it is not deployed"),
    }
    failure = failures.get(replicas)

    def results(timeout_s: float) -> list[str]:
        assert timeout_s > 0
        if failure is not None:
            raise failure
        return ["of-replica"]

    def app_handle(name: str) -> Any:
        if isinstance(failure, ServiceUnavailable):
            raise FabricUnavailable(f"there is no application {name}")

        def broadcast(*asked: str) -> Any:
            assert asked == ("cancel_named", "named")
            return SimpleNamespace(results=results)

        return SimpleNamespace(broadcast=broadcast)

    monkeypatch.setattr(ray_serve, "app_handle", app_handle)
    sandboxes: Any = Sandboxes()
    cancel = ServiceCalls(sandboxes, sandboxes).cancel(service_target("weather", "1"), "named")
    if failure is None:
        await cancel
        assert sandboxes.cancelled == [("draining", "named")]
    else:
        with pytest.raises(type(failure)):
            await cancel
        assert sorted(sandboxes.cancelled) == [("draining", "named"), ("of-replica", "named")]
