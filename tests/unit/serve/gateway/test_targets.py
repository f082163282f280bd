"""What an agent's token reaches on the data path: the tools of one instance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from aenv_ray.clock import FakeClock
from aenv_ray.errors import Forbidden
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.auth import Principal
from aenv_ray.serve.gateway.data.targets import Targets


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
