"""Calls, streams and logs: what callers do with the instances of a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from aenv_ray.actors.calls.caller_notes import HeldReports, Report, message_of, note_of
from aenv_ray.actors.calls.wire import CALL_GRACE_S, CallMessage, WireResult
from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.instance import InstanceLife
from aenv_ray.actors.host.instance_table import InstanceTable, absent
from aenv_ray.clock import Clock
from aenv_ray.engines.base import OnProgress, Sandbox
from aenv_ray.errors import SandboxLost
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import LogMessage, Question

DELAYED_S: Final = 0.005
"""A pipelined call that waited this long in Ray's queues may be sent to the sandbox together with
the calls behind it."""


class HostCalls:
    """Forwards calls to the sandboxes of one host.

    Args:
        adopted: Set once the host has adopted the sandboxes of an earlier host; calls wait for it.
    """

    def __init__(
        self,
        host_id: HostId,
        table: InstanceTable,
        engines: HostEngines,
        adopted: asyncio.Event,
        clock: Clock,
    ) -> None:
        self._id = host_id
        self._lives = table.lives
        self._sandboxes = table.sandboxes
        self._engines = engines
        self._adopted = adopted
        self._clock = clock

    async def call(self, message: CallMessage, on_progress: OnProgress | None = None) -> WireResult:
        """Run one call in an instance and return the result.

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
                may_wait=self._is_delayed(message),
            )
            return WireResult(message.method, result)
        except SandboxLost as error:
            # A released or expired instance loses its sandbox too: raise the actual cause.
            raise (life.end_error() if life.ended else error) from None
        finally:
            life.call_finished(self._clock.now())

    def _is_delayed(self, message: CallMessage) -> bool:
        """Whether a pipelined call has waited so long that a short wait for others costs little.

        A caller that pipelines waits for all its calls, so a delay of a single one matters little.
        Calls that were not pipelined carry no time: the clocks of two nodes may differ by
        `DELAYED_S`.
        """
        return bool(message.sent_at) and self._clock.now() - message.sent_at > DELAYED_S

    async def stream(
        self, message: CallMessage
    ) -> AsyncGenerator[Report | LogMessage | Question | WireResult]:
        """Run one call; yield ``(progress, total, message)`` tuples and notes, then the result."""
        reports, news = HeldReports(), asyncio.Event()

        def add(progress: float | None, total: float | None, text: str | None) -> None:
            reports.add((progress, total, text))
            news.set()

        task = asyncio.create_task(self.call(message, add))
        task.add_done_callback(lambda _: news.set())
        try:
            while reports or not task.done():
                await news.wait()
                while reports:
                    report = reports.pop()
                    if (note := note_of(report)) is None:
                        yield report
                    elif (told := message_of(note)) is not None:
                        yield told
                news.clear()
            yield await task
        finally:
            task.cancel()

    async def logs(
        self, instance_id: InstanceId, tail_lines: int | None, follow: bool
    ) -> AsyncGenerator[str, None]:
        """Return the output of an instance, see `HostEngines.logs`; does not count as activity."""
        life, _ = await self.enter(instance_id)
        return self._engines.logs(life.record.spec.engine, life.record.id, tail_lines, follow)

    async def enter(self, instance_id: InstanceId) -> tuple[InstanceLife, Sandbox]:
        """Return a live instance and its sandbox, after adoption of an earlier host's instances.

        Raises:
            InstanceNotFound: This host has no such instance.
            AenvError: The instance has ended; the error says why.
        """
        if not self._adopted.is_set():
            await self._adopted.wait()
        life = self._lives.get(instance_id)
        if life is None:
            raise absent(self._id, instance_id)
        sandbox = self._sandboxes.get(life.record.id)
        if sandbox is None:
            raise life.end_error()
        return life, sandbox
