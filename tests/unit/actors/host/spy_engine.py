"""The engine of the host's unit tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aenv_ray.engines.base import RunningSandbox, Sandbox, SandboxSpec, start_failed
from aenv_ray.engines.fake.engine import FakeEngine
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId

HOST = HostId("aenv-host-n-0")
AWAY = "the node's launcher is away"


class SpyEngine(FakeEngine):
    """A fake engine that remembers what it made, can be held up, and out of reach for a while."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.made: list[InstanceId] = []
        self.deadlines: dict[InstanceId, float] = {}
        self.dead: set[InstanceId] = set()
        """Those that die when they are asked, and not before."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_gate = asyncio.Event()
        self.stop_gate = asyncio.Event()
        self.stop_gate.set()
        self.deadline_gate = asyncio.Event()
        self.deadline_gate.set()
        self.away_for = 0
        """How many more stops, attaches and listings meet nobody."""
        self.refusal: AenvError = FabricUnavailable(AWAY)
        """What they raise."""
        self._failures: list[str] = []

    def fail_next_start(self, reason: str) -> None:
        """Make one of the next starts fail; several calls apply in their order."""
        self._failures.append(reason)

    async def start_many(self, specs: Sequence[SandboxSpec]) -> list[Sandbox | AenvError]:
        self.at_gate.set()
        await self.gate.wait()
        self.made += [spec.instance_id for spec in specs]
        failed: list[Sandbox | AenvError] = [
            start_failed(spec.instance_id, self._failures.pop(0))
            for spec in specs[: len(self._failures)]
        ]
        return failed + await super().start_many(specs[len(failed) :])

    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:
        if instance_id in self.dead:
            self.kill(instance_id)
        self.deadlines[instance_id] = deadline
        await super().set_deadline(instance_id, deadline)
        await self.deadline_gate.wait()

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:
        self._reach()
        await self.stop_gate.wait()
        await super().stop(instance_ids)

    async def attach(self, instance_id: InstanceId) -> Sandbox:
        self._reach()
        return await super().attach(instance_id)

    async def running(self) -> list[RunningSandbox]:
        self._reach()
        return await super().running()

    def _reach(self) -> None:
        if self.away_for:
            self.away_for -= 1
            raise self.refusal

    async def ids(self) -> set[InstanceId]:
        return {sandbox.instance_id for sandbox in await self.running()}
