"""The sandbox of a replica."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.errors import (
    FunctionFailed,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.serve.services import sandbox as service_sandbox
from aenv_ray.serve.services.sandbox import ReplicaSandbox
from tests.fake_clock import FakeClock


class Box:
    """The instance of a replica."""

    def __init__(self, name: str, says: dict[str, object]) -> None:
        self.instance_id = name
        self.says = says
        self.is_gone = False
        self.is_released = False

    async def check_health(self, arguments: dict[str, object], timeout_s: float) -> Any:
        assert not arguments
        assert timeout_s > 0
        if self.is_gone:
            raise SandboxLost("it died", instance_id=self.instance_id)
        return {"success": True, "data": self.says}

    async def renew(self, ttl: str | float) -> Any:
        assert ttl

    async def release(self) -> None:
        self.is_released = True


class Boxes:
    def __init__(self) -> None:
        self.made: list[Box] = []
        self.says: dict[str, object] = {"status": "healthy"}

    async def make(self) -> Box:
        self.made.append(Box(f"box-{len(self.made)}", self.says))
        return self.made[-1]


class Hasty(FakeClock):
    """A clock that advances at every reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


async def test_a_dead_sandbox_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    boxes = Boxes()
    sandbox = ReplicaSandbox(boxes.make, FakeClock(), 5.0, "ann")
    await sandbox.open()
    boxes.made[0].is_gone = True
    await sandbox.check()
    assert (await sandbox.instance()).instance_id == "box-1"
    sandbox.lose("box-0")  # a late report about the first one
    (line,) = caplog.records
    assert (vars(line)["instance"], vars(line)["owner"]) == ("box-0", "ann")
    assert (await sandbox.instance()).instance_id == "box-1"
    await sandbox.close()
    assert boxes.made[1].is_released


async def test_the_health_check_fails_for_an_unhealthy_environment() -> None:
    boxes = Boxes()
    sandbox = ReplicaSandbox(boxes.make, FakeClock(), 5.0, "ann")
    await sandbox.open()
    boxes.made[0].says = {"status": "unhealthy", "message": "no model"}
    with pytest.raises(FunctionFailed, match="no model"):
        await sandbox.check()
    await sandbox.close()


async def test_a_sandbox_that_never_becomes_healthy_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_sandbox, "_POLL_S", 0.001)
    boxes = Boxes()
    boxes.says = {"status": "unhealthy", "message": "no model"}
    sandbox = ReplicaSandbox(boxes.make, Hasty(), 3.0, "ann")
    with pytest.raises(SandboxStartFailed, match="no model"):
        await sandbox.open()
    assert [box.is_released for box in boxes.made] == [True]
