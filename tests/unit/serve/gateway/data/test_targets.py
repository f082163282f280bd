"""What tokens and addresses reach on the data path: instances of their owner, or of an agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from aenv_ray.errors import Forbidden, InstanceNotFound
from aenv_ray.hub.records import Lease, Role, unknown_instance
from aenv_ray.serve.gateway.auth import Principal
from aenv_ray.serve.gateway.data.targets import Targets
from tests.fake_clock import FakeClock


async def _agent(_: HTTPConnection) -> Principal:
    return Principal(Role.AGENT, "ann", "probe-1", "t")


def _asking(instance_id: str) -> HTTPConnection:
    return HTTPConnection({"type": "http", "path_params": {"instance_id": instance_id}})


async def test_an_agent_reaches_the_tools_of_its_instance_and_nothing_else() -> None:
    """Invariant 8; and its call ids are not those of the owner (invariant 14)."""
    deps: Any = SimpleNamespace(authenticate=_agent, clock=FakeClock())
    targets = Targets(deps)
    with pytest.raises(Forbidden, match="another instance"):
        await targets.of_path(_asking("probe-2"))
    target = await targets.of_path(_asking("probe-1"))
    with pytest.raises(Forbidden, match="only list and call the tools"):
        target.check_not_agent()
    assert target.scoped({"aenv/call_id": "graded"}) == {"aenv/call_id": "agent graded"}


LEASE = Lease(
    id="probe-1", reference="probe@1.0.0", digest="d", owner="ann", created_at=0.0, deadline=60.0,
    capability="secretname",
)  # fmt: skip


class _Hub:
    """A hub with one lease."""

    async def lease(self, instance_id: str) -> Lease:
        assert instance_id == LEASE.id
        return LEASE

    async def lease_of_capability(self, capability: str) -> Lease:
        assert capability == LEASE.capability
        return LEASE


@pytest.mark.parametrize(
    ("principal", "is_allowed"),
    [
        (Principal(Role.USER, "ann", None, "t"), True),
        (Principal(Role.PUBLISHER, "bob", None, "t"), False),
        (Principal(Role.ADMIN, "root", None, "t"), True),
    ],
)
async def test_an_owner_reaches_their_own_instances_only(
    principal: Principal, is_allowed: bool
) -> None:
    """Invariant 15: to another owner, the instance does not exist."""

    async def authenticate(_: HTTPConnection) -> Principal:
        return principal

    targets = Targets(SimpleNamespace(authenticate=authenticate, clock=FakeClock(), hub=_Hub()))  # type: ignore[arg-type]
    for _ in ("asked", "remembered"):
        if is_allowed:
            assert (await targets.of_path(_asking("probe-1"))).instance_id == "probe-1"
        else:
            with pytest.raises(InstanceNotFound) as refused:
                await targets.of_path(_asking("probe-1"))
            unknown = unknown_instance("probe-1")
            assert (refused.value.message, refused.value.hint) == (unknown.message, unknown.hint)


async def test_an_address_is_of_one_instance() -> None:
    """Invariant 15: the id that a client sends beside an address does not choose another one."""
    targets = Targets(SimpleNamespace(clock=FakeClock(), hub=_Hub()))  # type: ignore[arg-type]

    def asking(instance_id: str) -> HTTPConnection:
        headers = {
            "AEnvCore-MCPProxy-URL": "http://secretname:8081",
            "AEnvCore-EnvInstance-ID": instance_id,
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items() if value]
        return HTTPConnection({"type": "http", "headers": raw, "path": "/mcp", "server": ("g", 1)})

    for instance_id in ("probe-1", ""):
        assert (await targets.of_headers(asking(instance_id))).instance_id == "probe-1"
    with pytest.raises(InstanceNotFound, match="does not belong to probe-2"):
        await targets.of_headers(asking("probe-2"))
