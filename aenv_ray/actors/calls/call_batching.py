"""The batch protocol between a process with many calls and a host.

A task of a Ray actor costs more than most tool calls. A caller therefore sends all its new calls to
a host in one task, `BatchServer.exchange`, which returns as soon as one call has ended or reported
progress. The next task carries new calls, and the keys of those still running; a slow call delays
no other. The host keeps the state of a call under a key that the caller chose.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pydantic_core

from aenv_ray.actors.calls.caller_notes import HeldReports, Report
from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.wire import CallMessage, WireResult, decode_json
from aenv_ray.background_tasks import start_shared
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.engines.base import OnProgress
from aenv_ray.errors import AenvError, CallCancelled, InternalError, from_wire, to_wire

logger = logging.getLogger(__name__)

Begin = list[Any]
"""``[key, name, wants_progress, message]``: the caller's unique key; a name by which any process
can cancel the call, see `call_name`, or ""; whether to send progress reports; a `wire.CallMessage`
in bytes."""
BatchAnswer = list[Any]
"""``[key, kind, JSON text]``, with one of the four kinds below."""
RESULT: Final = 0
ERROR: Final = 1
UNKNOWN: Final = 2
"""The host does not know the call, as after its restart. The caller sends the message again; the
call id prevents a second run."""
PROGRESS: Final = 3
"""Reports since the last answer, as a list of ``[progress, total, message]``."""

Reports = list[Report]
Run = Callable[[bytes, OnProgress | None], Coroutine[Any, Any, WireResult]]
Exchange = Callable[[list[Begin], list[str], list[str]], Awaitable[list[BatchAnswer]]]
"""Calls `BatchServer.exchange` of a host with ``(begin, follow, cancel)``."""
Send = Callable[[bytes], Awaitable[Any]]
"""Sends a `wire.CallMessage` and returns the value of its result."""

UNCLAIMED_S: Final = 60.0
"""How long an outcome is held for a caller that may come back."""
ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Size at which one task stops adding answers; the first answer may be larger."""
_LINGER_S: Final = 0.0002
"""Wait this long per running call before answering, since calls of a batch often end together."""
_MAX_LINGERED: Final = 10

_MAX_CALLS: Final = 64
"""Calls per task. A task returns when one of its calls ends, and the keys of the others are sent
again; the limit bounds that cost."""
_MAX_BYTES: Final = 4 * 1024 * 1024
"""Total size of the messages of a task; a larger message travels alone."""
_GAP_S: Final = 0.0002
"""Pause between two tasks, for each call in flight. So batches grow with load, and a single call
never waits."""
_MAX_GAPS: Final = 16
_MAX_HOSTS: Final = 10_000


def call_name(instance_id: str, name: str) -> str:
    """Return the name of a call for its host: it is short, and contains the instance."""
    return f"{instance_id}\n{hashlib.sha256(name.encode()).hexdigest()}"


def instance_of(key_or_name: str) -> str:
    """Return the instance in a name of `call_name`; "" for a key."""
    return key_or_name.rpartition("\n")[0]


# --- the host's side -----------------------------------------------------------------------------


class BatchServer:
    """The calls that batches brought to one host.

    Args:
        run: Runs a call, given its message and where to report progress.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls: dict[str, _HostedCall] = {}

    async def exchange(
        self, begin: Sequence[Begin], follow: Sequence[str], cancel: Sequence[str]
    ) -> list[BatchAnswer]:
        """Begin, follow and cancel calls; wait until one has ended or reported progress.

        Args:
            begin: New calls. A known key continues its call.
            follow: Keys of calls from earlier batches.
            cancel: Keys and names of calls to cancel. Unknown ones are ignored.

        Returns:
            Each outcome once, progress reports, and which keys of `follow` are unknown. Empty if
            there is nothing to wait for, or another exchange took the outcomes.

        Cancelling this method cancels no call.
        """
        if cancel:
            self._cancel(frozenset(cancel) - {""})
        unknown: list[BatchAnswer] = [
            [key, UNKNOWN, b""] for key in follow if key not in self._calls
        ]
        calls = [self._calls[key] for key in follow if key in self._calls]
        calls += [self._started(*one) for one in begin]
        if unknown or not calls:
            return unknown
        news = asyncio.Event()
        for call in calls:
            call.follow(news)
        try:
            await news.wait()
            running = sum(not call.task.done() for call in calls)
            if running:
                await asyncio.sleep(min(running, _MAX_LINGERED) * _LINGER_S)
            return self._taken(calls)
        finally:
            for call in calls:
                if self._calls.get(call.key) is call:
                    call.unfollow(news)

    def _cancel(self, keys_or_names: frozenset[str]) -> None:
        for call in self._calls.values():
            if call.key in keys_or_names or call.name in keys_or_names:
                call.task.cancel()

    def _started(self, key: str, name: str, wants_progress: bool, message: bytes) -> _HostedCall:
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _HostedCall(key, name, self._forget)
            call.start(self._run(message, call.report if wants_progress else None))
        return call

    def _taken(self, calls: Sequence[_HostedCall]) -> list[BatchAnswer]:
        answers: list[BatchAnswer] = []
        size = 0
        for call in calls:
            if self._calls.get(call.key) is not call:
                continue  # another exchange took its outcome
            found = call.answers()
            size += sum(len(answer[2]) for answer in found)
            if answers and size > ANSWER_BYTES:
                break
            answers += found
            call.reports.clear()
            if call.task.done():
                del self._calls[call.key]
        return answers

    def _forget(self, call: _HostedCall) -> None:
        if call.news is None and self._calls.get(call.key) is call:
            del self._calls[call.key]


class _HostedCall:
    """One call, from its start until its caller has the outcome."""

    task: asyncio.Task[WireResult]

    def __init__(self, key: str, name: str, forget: Callable[[_HostedCall], None]) -> None:
        self.key = key
        self.name = name
        self.news: asyncio.Event | None = None
        """Wakes the exchange that follows the call; None if none does."""
        self.reports = HeldReports()
        self._forget = forget

    def start(self, run: Coroutine[Any, Any, WireResult]) -> None:
        self.task = asyncio.get_running_loop().create_task(run)
        self.task.add_done_callback(self._end)

    def follow(self, news: asyncio.Event) -> None:
        if self.news is not None:
            self.news.set()  # Ray sent the task again: the first one need not wait any longer
        self.news = news
        if self.reports or self.task.done():
            news.set()

    def unfollow(self, news: asyncio.Event) -> None:
        if self.news is news:
            self.news = None
            if self.task.done():
                self._expire()

    def report(self, progress: float | None, total: float | None, message: str | None) -> None:
        self.reports.add((progress, total, message))
        if self.news is not None:
            self.news.set()

    def _end(self, task: asyncio.Task[WireResult]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may never ask for it
        if self.news is None:
            self._expire()
        else:
            self.news.set()

    def _expire(self) -> None:
        asyncio.get_running_loop().call_later(UNCLAIMED_S, self._forget, self)

    def answers(self) -> list[BatchAnswer]:
        """Return the reports and, if the call has ended, its outcome."""
        found: list[BatchAnswer] = []
        if self.reports:
            found.append([self.key, PROGRESS, pydantic_core.to_json(list(self.reports))])
        if self.task.done():
            found.append(self._outcome())
        return found

    def _outcome(self) -> BatchAnswer:
        if self.task.cancelled():
            error: BaseException | None = _cancelled()
        else:
            error = self.task.exception()
        if error is None:
            return [self.key, RESULT, self.task.result().json]
        if not isinstance(error, AenvError):
            logger.error("a call failed in its host", exc_info=error)
            error = InternalError(f"the host failed: {type(error).__name__}: {error}")
        return [self.key, ERROR, pydantic_core.to_json(to_wire(error), fallback=str)]


# --- the caller's side ---------------------------------------------------------------------------


@dataclass(eq=False)
class BatchedCall:
    """A call in flight."""

    key: str
    name: str
    message: bytes
    result: asyncio.Future[bytes]
    """JSON text. Raises AenvError, or Ray's error if the host is gone."""
    client: BatchClient
    on_progress: Callable[[Reports], None] | None = None

    def begin(self) -> Begin:
        """Return the call in the form in which it is sent."""
        return [self.key, self.name, self.on_progress is not None, self.message]

    def cancel(self) -> None:
        """Cancel it; its tool is told to stop. Does nothing if it has ended."""
        self.client.cancel(self)

    def forget(self) -> None:
        """Ignore its outcome from now on; the call itself continues."""
        self.client.forget(self)


class BatchClient:
    """The calls of this process to one host. Use it on one event loop.

    Args:
        exchange: The host's method `exchange`.

    A restarted host gets its calls again; their ids prevent a second run.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._calls: dict[str, BatchedCall] = {}
        self._new: list[BatchedCall] = []
        self._running: list[str] = []
        self._cancelled: list[str] = []
        self._sent_at = 0.0
        self._is_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self,
        message: bytes,
        name: str = "",
        on_progress: Callable[[Reports], None] | None = None,
    ) -> BatchedCall:
        """Send a call.

        Args:
            message: See `aenv_ray.actors.calls.wire.CallMessage`.
            name: Name by which any process can cancel the call; "" if none can.
            on_progress: Receives progress reports, in batches. None asks for none.
        """
        key = f"{self._prefix}-{next(self._numbers)}"
        call = BatchedCall(key, name, message, self._loop.create_future(), self, on_progress)
        self._calls[key] = call
        self._new.append(call)
        self._schedule()
        return call

    def cancel(self, call: BatchedCall) -> None:
        """See `BatchedCall.cancel`."""
        if self._calls.pop(call.key, None) is None:
            return
        fail_cancelled(call.result)
        if call in self._new:
            self._new.remove(call)
        else:
            self._cancelled.append(call.key)
            self._schedule()

    def forget(self, call: BatchedCall) -> None:
        """See `BatchedCall.forget`."""
        self._calls.pop(call.key, None)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            gap_s = min(len(self._calls) - 1, _MAX_GAPS) * _GAP_S
            at = self._sent_at + gap_s
            if at <= self._loop.time():
                self._loop.call_soon(self._flush)
            else:
                self._loop.call_at(at, self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        self._sent_at = self._loop.time()
        running = [key for key in self._running if key in self._calls]
        new, cancelled = self._new, self._cancelled
        self._running, self._new, self._cancelled = [], [], []
        while new or running or cancelled:
            count = _batch_size(new)
            begin, new = new[:count], new[count:]
            follow, running = running[: _MAX_CALLS - count], running[_MAX_CALLS - count :]
            task = start_shared(self._send_batch(begin, follow, cancelled))
            cancelled = []
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_batch(
        self, begin: Sequence[BatchedCall], follow: Sequence[str], cancel: list[str]
    ) -> None:
        keys = [*follow, *(call.key for call in begin)]
        try:
            answers = await self._exchange([call.begin() for call in begin], list(follow), cancel)
        except Exception as exc:  # noqa: BLE001  # Ray's: each call raises it to its caller
            for key in keys:
                self._fail(key, exc)
            return
        unknown = {key for key, kind, _ in answers if kind == UNKNOWN}
        for key, kind, text in answers:
            if kind != UNKNOWN:
                self._take(key, kind, text)
        for key in keys:
            if key in unknown and key in self._calls:
                self._new.append(self._calls[key])
            elif key in self._calls:
                self._running.append(key)
        if self._running or self._new:
            self._schedule()

    def _take(self, key: str, kind: int, text: bytes) -> None:
        if kind == ERROR:
            self._fail(key, from_wire(pydantic_core.from_json(text)))
        elif kind == PROGRESS:
            call = self._calls.get(key)
            if call is not None and call.on_progress is not None:
                reports = pydantic_core.from_json(text)
                call.on_progress([(done, total, message) for done, total, message in reports])
        else:
            call = self._calls.pop(key, None)
            if call is not None and not call.result.done():
                call.result.set_result(text)

    def _fail(self, key: str, error: Exception) -> None:
        call = self._calls.pop(key, None)
        if call is not None and not call.result.done():
            call.result.set_exception(error)


class BatchClients:
    """The clients of this process, one for each host. Use it on one event loop."""

    def __init__(self) -> None:
        # A client may be evicted while it has calls: these still end as usual.
        self._clients: BoundedCache[Any, BatchClient] = BoundedCache(_MAX_HOSTS)

    def of(self, handle: EnvHandle) -> BatchClient:
        """Return the client of an instance's host."""
        host = host_of(handle)
        client = self._clients.get(host)
        if client is None:
            client = BatchClient(host.exchange.remote)
            self._clients.put(host, client)
        return client

    def to(self, handle: EnvHandle) -> Send:
        """Return a function that sends calls to an instance."""
        client = self.of(handle)

        async def send(message: bytes) -> Any:
            call = client.send(message)
            try:
                text = await call.result
            except asyncio.CancelledError:
                call.cancel()
                raise
            return decode_json(CallMessage.decode(message).method, text)

        return send


def _cancelled() -> CallCancelled:
    return CallCancelled("the caller cancelled the call", hint="its tool was told to stop")


def fail_cancelled(result: asyncio.Future[bytes]) -> None:
    """Set the result of a call that its caller cancelled, unless it has one."""
    if not result.done():
        result.set_exception(_cancelled())
        result.exception()  # mark it as retrieved: most callers do not ask for it


def _batch_size(new: Sequence[BatchedCall]) -> int:
    """Return how many of the calls travel in one task."""
    size = 0
    for count, call in enumerate(new[:_MAX_CALLS]):
        size += len(call.message)
        if count and size > _MAX_BYTES:
            return count
    return min(len(new), _MAX_CALLS)
