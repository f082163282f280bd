"""Runs calls from an event loop: sync functions in threads, cancellation, progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final

import pydantic_core

from aenv_ray.runtime.door.answers import EncodedOutcome, fault_outcome
from aenv_ray.runtime.door.caller import Caller
from aenv_ray.runtime.door.dispatch import Dispatcher, OnToolProgress
from aenv_ray.runtime.door.host.link import OF_HOSTS
from aenv_ray.runtime.door.outcomes import key_of
from aenv_ray.runtime.faults import Fault

MAX_THREADS: Final = 256
"""Sync functions that run at once; more wait in order. The same as at the fast door."""
LONGEST_CALL_S: Final = 3600.0
"""Default timeout: HTTP clients end a call by disconnecting."""
CALL_ID: Final = "aenv/call_id"
TIMEOUT_S: Final = "aenv/timeout_s"
_IDLE_S: Final = 10.0
_CLEANUP_S: Final = 0.3
_GRACE_S: Final = 2.0
"""How long after its deadline a call may stay unanswered by the dispatcher."""


class Workers:
    """Runs jobs in daemon threads, which are started as needed and end when idle.

    Python joins the threads of `concurrent.futures` at exit, so that one stuck tool would keep a
    stopped server alive.

    Args:
        max_threads: Largest number of jobs that run at once.
        name: The name of the threads.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unclaimed = 0
        """Number of idle threads minus that of waiting jobs."""

    @property
    def busy(self) -> int:
        """How many threads run a job."""
        with self._lock:
            return self._threads - max(0, self._unclaimed)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, as soon as a thread is free.

        Raises:
            RuntimeError: The sandbox's limits allow no thread now; the job will not run.
        """
        with self._lock:
            # More than one if earlier jobs got none.
            while self._unclaimed <= 0 and self._threads < self._max_threads:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError:
                    if not self._threads:
                        raise
                    break
                self._threads += 1
                self._unclaimed += 1
            self._unclaimed -= 1
            self._jobs.put(job)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._unclaimed <= 0:
                        continue  # a job for this thread was submitted meanwhile
                    self._unclaimed -= 1
                    self._threads -= 1
                return
            job()
            with self._lock:
                self._unclaimed += 1


class Disconnect:
    """The event that a client disconnects; it has at most one listener."""

    def __init__(self) -> None:
        self.happened = False
        self._listener: Callable[[], None] | None = None

    def happen(self) -> None:
        """Call the listener. Idempotent."""
        if not self.happened:
            self.happened = True
            if self._listener is not None:
                self._listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Set the listener; it is called immediately if the client is already gone."""
        self._listener = listener
        if self.happened:
            listener()


class AsyncCalls:
    """Runs calls through a dispatcher without blocking the event loop.

    Args:
        dispatcher: Runs the calls.
        max_threads: Sync functions that run at once; health checks have separate threads.
    """

    def __init__(self, dispatcher: Dispatcher, max_threads: int = MAX_THREADS) -> None:
        self.dispatcher = dispatcher
        self._workers = Workers(max_threads, "aenv-call")
        self._health_workers = Workers(8, "aenv-health")
        self._running: set[_Job] = set()

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        *,
        disconnect: Disconnect | None = None,
        on_progress: OnToolProgress | None = None,
        caller: Caller | None = None,
    ) -> EncodedOutcome:
        """Run one call and return its outcome.

        Args:
            method: As for `Dispatcher.submit`.
            params: As for `Dispatcher.submit`. The default timeout is `LONGEST_CALL_S`.
            disconnect: When the client disconnects the call is cancelled, unless the client chose
                its id, to repeat it.
            on_progress: Called with progress reports, on this loop.
            caller: Receives log messages and requests, from any thread.

        Raises:
            asyncio.CancelledError: This coroutine was cancelled, and so was the call.
        """
        meta = {k: v for k, v in (params.get("_meta") or {}).items() if k not in OF_HOSTS}
        named = meta.get(CALL_ID) is not None
        call_id = str(meta[CALL_ID]) if named else f"public-{uuid.uuid4().hex}"
        timeout_s = meta.get(TIMEOUT_S, LONGEST_CALL_S)
        params = {**params, "_meta": {**meta, CALL_ID: call_id, TIMEOUT_S: timeout_s}}
        job = _Job(self.dispatcher, call_id, method, params, on_progress, caller)
        self._running.add(job)
        workers = self._health_workers if method == "aenv/health" else self._workers
        expiry = asyncio.get_running_loop().call_later(timeout_of(timeout_s) + _GRACE_S, job.expire)
        try:
            try:
                workers.submit(job.run)
            except RuntimeError as exc:
                return _no_thread(params.get("name") or method, exc)
            if disconnect is not None and not named:
                disconnect.listen(lambda: job.cancel("the caller went away"))
            return await job.outcome
        except asyncio.CancelledError:
            if not (named and disconnect is not None and disconnect.happened):
                job.cancel("the caller cancelled")
            raise
        finally:
            expiry.cancel()
            self._running.discard(job)

    async def stop(self, reason: str) -> None:
        """Cancel all calls, and give their functions a moment to clean up."""
        jobs = list(self._running)
        for job in jobs:
            job.cancel(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLEANUP_S):
                if jobs:
                    await asyncio.sleep(_CLEANUP_S / 6)  # async functions end on another loop
                while self._workers.busy:  # noqa: ASYNC110  # threads set no asyncio.Event
                    await asyncio.sleep(0.005)


class _Job:
    """One call, run in a thread."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        call_id: str,
        method: str,
        params: dict[str, Any],
        on_progress: OnToolProgress | None,
        caller: Caller | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[EncodedOutcome] = self._loop.create_future()
        self._dispatcher = dispatcher
        self._key = key_of(method, call_id)
        self._method = method
        self._params = params
        self._on_progress = on_progress
        self._caller = caller
        self._cancelled: str | None = None
        self._started = False
        self._ended = False

    def run(self) -> None:
        self._started = True
        if self._cancelled is not None:
            self._refuse("call_cancelled", f"cancelled before it ran: {self._cancelled}")
            return
        progress = self._tell_progress if self._on_progress is not None else None
        try:
            self._dispatcher.submit(
                self._method, self._params, self._finish, progress, self._caller
            )
        except Exception as exc:  # noqa: BLE001  # a bug of ours: answer the caller anyway
            self._refuse("internal_error", f"{type(exc).__name__}: {exc}")

    def cancel(self, reason: str) -> None:
        self._cancelled = reason
        if self._dispatcher.cancel(self._key, reason):
            return
        if not self._started:
            self._refuse("call_cancelled", f"cancelled before it ran: {reason}")
        elif not self._ended:
            # Its thread has started, but not submitted it yet.
            self._loop.call_later(0.01, self.cancel, reason)

    def expire(self) -> None:
        """Answer a call that got no thread, or no outcome, by its deadline."""
        self._cancelled = "no thread was free in time"
        self._refuse("tool_timeout", "too many calls are running: no thread was free in time")

    def _refuse(self, code: str, message: str) -> None:
        self._finish(fault_outcome(Fault(code, message)))

    def _finish(self, outcome: EncodedOutcome) -> None:
        self._ended = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: EncodedOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _tell_progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self._on_progress is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_progress, progress, total, message)


def _no_thread(name: str, exc: RuntimeError) -> EncodedOutcome:
    return fault_outcome(
        Fault(
            "sandbox_exhausted",
            f"{name!r} did not run: {exc}",
            "the sandbox has no processes left",
            tool_name=name,
            died_of="processes",
        )
    )


def timeout_of(value: Any) -> float:
    """Return how long a call with this timeout may run; the dispatcher refuses an invalid one."""
    is_number = isinstance(value, int | float) and value > 0
    return min(float(value), 86_400.0) if is_number else LONGEST_CALL_S


def read_outcome(outcome: EncodedOutcome) -> Any:
    """Return the JSON data of a result.

    Raises:
        Fault: The outcome is an error.
    """
    message = pydantic_core.from_json(b"{" + outcome + b"}")
    if "error" not in message:
        return message["result"]
    data = dict(message["error"]["data"])
    code, text = data.pop("code"), data.pop("message")
    raise Fault(code, text, data.pop("hint", None), **data)
