"""What engines share: starting and stopping several sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from aenv_ray.engines.base import EndCause, Sandbox, SandboxSpec, start_each
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import AenvError
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation
from aenv_ray.project.config import EnvironmentConfig


def spec(name: str) -> SandboxSpec:
    return SandboxSpec(InstanceId(name), Path("/project"), EnvironmentConfig(name="e"), 0.0)


@pytest.mark.parametrize("fails", [False, True], ids=["cancelled", "failed"])
async def test_a_batch_that_is_given_up_leaves_no_sandbox(fails: bool) -> None:
    """Invariant 3: its caller never learns the ids of those that had started."""
    stopped: list[InstanceId] = []
    has_started = asyncio.Event()

    async def never() -> EndCause:
        raise NotImplementedError

    async def start_one(spec: SandboxSpec) -> Sandbox | AenvError:
        if spec.instance_id == "first":
            has_started.set()
            return DoorSandbox(spec.instance_id, Isolation(kind="none"), "bare", never)
        await has_started.wait()
        await asyncio.sleep(0)
        if fails:
            raise OSError("no space left on device")
        return await asyncio.Future[Sandbox]()

    async def stop(ids: Sequence[InstanceId]) -> None:
        stopped.extend(ids)

    batch = asyncio.create_task(start_each(start_one, stop, [spec("first"), spec("second")]))
    await has_started.wait()
    await asyncio.sleep(0)
    if not fails:
        batch.cancel()
    with pytest.raises(ExceptionGroup if fails else asyncio.CancelledError):
        await batch
    assert stopped == ["first"]
