"""What callers do with the instances of a host: calls, streams and logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from aenv_ray.actors.calls.wire import CallMessage, WireResult
from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.instance import InstanceLife
from aenv_ray.actors.host.instance_table import Residents
from aenv_ray.clock import Clock
from aenv_ray.engines.base import OnProgress, Sandbox
from aenv_ray.errors import InstanceNotFound, SandboxLost
from aenv_ray.ids import HostId, InstanceId

CALL_GRACE_S: Final = 5.0
"""How long after a call's own deadline its sandbox counts as not answering."""
LATE_S: Final = 0.005
"""A call that stood this long in Ray's queues, behind others of its caller's, is in no hurry."""


class HostCalls:
    """Brings calls to the sandboxes of one host.

    Args:
        host_id: Named in errors.
        residents: Whose sandboxes they are.
        engines: Which made them.
        adopted: Set once what an earlier host of this id left is taken over: calls wait for it.
        clock: For what counts as activity.
    """

    def __init__(
        self,
        host_id: HostId,
        residents: Residents,
        engines: HostEngines,
        adopted: asyncio.Event,
        clock: Clock,
    ) -> None:
        self._id = host_id
        self._lives = residents.lives
        self._sandboxes = residents.sandboxes
        self._engines = engines
        self._adopted = adopted
        self._clock = clock

    async def call(self, message: CallMessage, on_progress: OnProgress | None = None) -> WireResult:
        """Run one call in an instance and return its result.

        Raises:
            AenvError: See `InstanceLife.call_started` and `Sandbox.request_json`.
        """
        life, sandbox = await self.enter(message.instance_id)
        life.call_started()
        try:
            result = await sandbox.request_json(
                message.method,
                message.params,
                deadline_s=message.timeout_s + CALL_GRACE_S,
                on_progress=on_progress,
                may_wait=self._is_late(message),
            )
            return WireResult(message.method, result)
        except SandboxLost as error:
            # Released and expired instances lose their sandbox too: say which it was.
            raise (life.end_error() if life.ended else error) from None
        finally:
            life.call_finished(self._clock.now())

    def _is_late(self, message: CallMessage) -> bool:
        """Whether a call waited so long on its way that it may as well wait for those behind it.

        A caller that sends many and then waits for all wants them done, not each of them soon. Only
        what was sent right behind another counts: clocks of two nodes may be that far apart.
        """
        return bool(message.sent_at) and self._clock.now() - message.sent_at > LATE_S

    async def stream(self, message: CallMessage) -> AsyncIterator[Any]:
        """Run one call; yield ``(progress, total, message)`` tuples, then its result."""
        reports: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(self.call(message, lambda *report: reports.put_nowait(report)))
        task.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (report := await reports.get()) is not None:
                yield report
            yield await task
        finally:
            task.cancel()

    async def logs(
        self, instance_id: InstanceId, tail_lines: int | None, follow: bool
    ) -> AsyncGenerator[str, None]:
        """Return what an instance printed, see `HostEngines.logs`; asking is no activity."""
        life, _ = await self.enter(instance_id)
        return self._engines.logs(life.record.spec.engine, life.record.id, tail_lines, follow)

    async def enter(self, instance_id: InstanceId) -> tuple[InstanceLife, Sandbox]:
        """Return a live instance and its sandbox, once what an earlier host left is taken over.

        Raises:
            AenvError: Why it has ended; InstanceNotFound where it was never here.
        """
        if not self._adopted.is_set():
            await self._adopted.wait()
        life = self._lives.get(instance_id)
        if life is None:
            raise InstanceNotFound(
                f"host {self._id} has no instance {instance_id}",
                instance_id=instance_id,
                hint="it was released long ago, or never created",
            )
        sandbox = self._sandboxes.get(life.record.id)
        if sandbox is None:
            raise life.end_error()
        return life, sandbox
