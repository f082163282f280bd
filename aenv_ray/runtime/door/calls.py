"""A running call: its deadline, its progress, and how it is stopped."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.runtime.door.caller import LEVELS, Caller, Elicited, Sampled, unsupported
from aenv_ray.runtime.door.host.inner_environments import InnerEnvironment
from aenv_ray.runtime.system import child_tracking
from aenv_ray.runtime.system.reaper import LISTS_CHILDREN
from aenv_ray.runtime.system.threads import start_thread

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_WNOTHREAD: Final = 0x2000_0000
"""Linux: only children of the calling thread."""
_waitid: Final = getattr(os, "waitid", None)
_REAP_MS: Final = 1000
"""How long to wait for a killed child to end; one that waits for a disk may take longer."""
_INTERRUPT_RETRY_S: Final = 0.01
"""By then the destructor in which an interrupt was lost has usually ended."""
_WATCH_RETRY_S: Final = 0.1

_current: contextvars.ContextVar[RunningCall | None] = contextvars.ContextVar(
    "aenv_call", default=None
)


class CallInterrupted(BaseException):
    """Raised in a tool's thread when its call is cancelled or its deadline has passed.

    Not an `Exception`, so that ``except Exception`` in a tool does not catch it.
    """


class RunningCall:
    """One call, from its arrival to its outcome.

    Args:
        key: The key of the call, see `outcomes.key_of`.
        name: The tool, reward or function.
        deadline: When the call is stopped; seconds on `time.monotonic`.
        on_progress: Called with ``(progress, total, message)``. None: reports are dropped.
        waiting: The call waits for a thread until `begin`.
        seed: The seed of the episode; None if it has none.
        caller: Receives log messages and requests. None: the caller takes neither.
        generation: For a call of an agent, from `CallGate.admit`; None for other calls.
    """

    __slots__ = (
        "_caller",
        "_earlier_children",
        "_lock",
        "_on_progress",
        "_running",
        "_stops",
        "_thread",
        "_waiting",
        "deadline",
        "generation",
        "key",
        "name",
        "seed",
        "stop_reason",
    )

    def __init__(
        self,
        key: str,
        name: str,
        deadline: float,
        on_progress: Callable[[float, float | None, str | None], None] | None = None,
        *,
        waiting: bool = False,
        seed: int | None = None,
        caller: Caller | None = None,
        generation: int | None = None,
    ) -> None:
        self.key = key
        self.generation = generation
        self.name = name
        self.seed = seed
        self.deadline = deadline
        self.stop_reason: str | None = None
        self._on_progress = on_progress
        self._caller = caller
        self._lock = threading.Lock()
        self._waiting = waiting
        self._running = False
        self._earlier_children: frozenset[int] = frozenset()
        self._thread: tuple[int, int] | None = None
        self._stops: tuple[Callable[[], Any], ...] = ()

    @property
    def call_id(self) -> str:
        """The id that the caller chose."""
        return self.key.partition(" ")[2]

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled or its deadline passed: stop working and return."""
        return self.stop_reason is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def rewards_before(self) -> int:
        """How many rewards had begun before this tool call; -1 for other calls."""
        return -1 if self.generation is None else self.generation

    def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        """Report progress to the caller; does nothing when the caller did not ask for reports."""
        if self._on_progress is not None:
            self._on_progress(progress, total, message)

    def log(self, level: str, message: str, data: Any = None) -> None:
        """Write a message to the instance's log, and send it to the caller, if it wants messages.

        Args:
            level: ``debug``, ``info``, ``notice``, ``warning``, ``error``, ``critical``, ``alert``
                or ``emergency``.
            message: Text.
            data: JSON data to send with it.

        Raises:
            ValueError: The level is unknown.
        """
        if level not in LEVELS:
            raise ValueError(f"unknown level {level!r}: expected one of {', '.join(LEVELS)}")
        with contextlib.suppress(OSError, ValueError):  # the tool may have closed its log
            more = "" if data is None else f" {data!r}"
            print(f"{level}: {message}{more}", flush=True)  # noqa: T201  # the instance's log
        if self._caller is not None:
            self._caller.log(level, message, data)

    def elicit(self, message: str, schema: Mapping[str, Any]) -> Elicited:
        """Ask the user of the caller, and wait for the answer until the deadline.

        Blocks: an async tool calls it with ``await asyncio.to_thread(…)``.

        Args:
            message: The question.
            schema: JSON Schema of the answer: an object whose properties are plain values.

        Raises:
            Fault: ``caller_unsupported``: the caller does not offer elicitation.
        """
        params = {"message": message, "requestedSchema": dict(schema)}
        answer = self._ask("elicitation", "elicitation/create", params)
        return Elicited(answer["action"], answer.get("content") or {})

    def sample(
        self, prompt: str, max_tokens: int = 1000, system_prompt: str | None = None
    ) -> Sampled:
        """Ask the model of the caller, and wait for the answer until the deadline.

        Blocks: an async tool calls it with ``await asyncio.to_thread(…)``.

        Args:
            prompt: The message of the user.
            max_tokens: Maximum number of tokens of the answer.
            system_prompt: None sends none.

        Raises:
            Fault: ``caller_unsupported``: the caller does not offer sampling.
        """
        content = {"type": "text", "text": prompt}
        params: dict[str, Any] = {
            "messages": [{"role": "user", "content": content}],
            "maxTokens": max_tokens,
        }
        if system_prompt is not None:
            params["systemPrompt"] = system_prompt
        answer = self._ask("sampling", "sampling/createMessage", params)
        return Sampled(answer["content"], str(answer.get("model", "")))

    def _ask(self, what: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if self._caller is None:
            raise unsupported(what)
        return self._caller.ask(method, params, self.remaining_s)

    def env(self, reference: str, key: str = "") -> InnerEnvironment:
        """Return another environment, to call it.

        Its instance starts at the first call, and ends with the instance that runs this call.

        Args:
            reference: ``name`` or ``name@version``; it must be in ``deployConfig.environments``.
            key: Each key has its own instance, for those who need several of one environment.
        """
        return InnerEnvironment(reference, key, current_call)

    # --- for the dispatcher -----------------------------------------------------------------

    def begin(self) -> bool:
        """Stop waiting; False when the call was stopped meanwhile and must not run."""
        with self._lock:
            self._waiting = False
            return self.stop_reason is None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its turn, stopped or not."""
        return self._waiting

    def stop_waiting(self, reason: str) -> bool:
        """Stop the call if it still waits, so that it never runs; False if it does not wait."""
        with self._lock:
            if not self._waiting or self.stop_reason is not None:
                return False
            self.stop_reason = reason
            return True

    def run_sync(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run a sync function in this thread, so that `stop` can interrupt it.

        Raises:
            CallInterrupted: `stop` was called meanwhile.
        """
        token = _current.set(self)
        try:
            with self._lock:
                if self.stop_reason is not None:
                    raise CallInterrupted
                self._thread = (threading.get_ident(), threading.get_native_id())
                self._earlier_children = _children_of_this_thread()
                self._running = True
            try:
                return function(**arguments)
            finally:
                self._leave()
        except CallInterrupted:
            # The interrupt may have hit `_leave` itself; it is delivered only once.
            self._leave()
            raise
        finally:
            _current.reset(token)

    async def run_async(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run an async function on the running loop; `bind_stop` adds what cancels it."""
        token = _current.set(self)
        try:
            return await function(**arguments)
        finally:
            _current.reset(token)

    def bind_stop(self, stop: Callable[[], Any]) -> None:
        """Add a function that `stop` calls; it is called at once if the call is already stopped."""
        with self._lock:
            self._stops += (stop,)
            late = self.stop_reason is not None
        if late:
            stop()

    def unbind_stop(self, stop: Callable[[], Any]) -> None:
        """Remove a function that was added by `bind_stop`; an unknown one is ignored."""
        with self._lock:
            self._stops = tuple(one for one in self._stops if one != stop)

    def stop(self, reason: str) -> None:
        """Stop the function; the first reason stays.

        The task of an async function is cancelled. A sync function is interrupted, and processes
        that it started are killed; inside a blocking C call it stops only when that call returns.
        """
        with self._lock:
            if self.stop_reason is not None:
                return
            self.stop_reason = reason
            stops = self._stops
            if self._running and self._thread is not None:
                _raise_in_thread(self._thread[0], CallInterrupted)
                _kill_children(self._thread[1], self._earlier_children)
        for stop in stops:
            stop()

    def interrupt_again(self) -> None:
        """Interrupt a sync function once more, after Python dropped the interrupt."""

        def run() -> None:
            time.sleep(_INTERRUPT_RETRY_S)
            with self._lock:
                if self._running and self.stop_reason is not None and self._thread is not None:
                    _raise_in_thread(self._thread[0], CallInterrupted)

        # In another thread: raised from here, it would hit the same code again.
        with contextlib.suppress(RuntimeError):  # the sandbox's limits allow no thread now
            start_thread(run)

    def _leave(self) -> None:
        with self._lock:
            was_stopped = self._running and self.stop_reason is not None
            if was_stopped and self._thread is not None:
                _raise_in_thread(self._thread[0], None)
            self._running = False
        if was_stopped and self._thread is not None:
            # The interrupt may have come after a fork, but before `subprocess` knew the child and
            # before `stop` could see it. Nothing else would end or reap it.
            for pid in _kill_children(self._thread[1], self._earlier_children):
                _reap(pid)


def current_call() -> RunningCall:
    """Return the call that runs the current code, to report progress and to check `is_cancelled`.

    Outside of a call, for example in a unit test, this is a call without a deadline.
    """
    return _current.get() or RunningCall("no call", "none", float("inf"))


def call_of(context: contextvars.Context | None = None) -> RunningCall | None:
    """Return the call of a context; of the current one if it is None."""
    return _current.get() if context is None else context.get(_current)


def retry_lost_interrupts() -> None:
    """Interrupt a call again when Python drops its interrupt.

    An exception in a destructor or in a callback of the garbage collector goes only to
    `sys.unraisablehook`, so that the function would run on.
    """
    previous = sys.unraisablehook

    def hook(unraisable: UnraisableHookArgs) -> None:
        if unraisable.exc_type is CallInterrupted:
            current_call().interrupt_again()  # Python calls this hook in the interrupted thread
        else:
            previous(unraisable)

    sys.unraisablehook = hook


def _raise_in_thread(ident: int, exception: type[BaseException] | None) -> None:
    """Raise `exception` in the thread at its next bytecode; None revokes a pending one."""
    target = ctypes.py_object(exception) if exception is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)


def _children_of_this_thread() -> frozenset[int]:
    """Return the pids that this thread started and that were not reaped; Linux only."""
    if _waitid is None:
        return frozenset()
    try:
        # One cheap system call for the usual case: no children.
        _waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WNOTHREAD)
    except OSError:
        return frozenset()
    return frozenset(_children_of_thread(threading.get_native_id()))


def _children_of_thread(native_id: int) -> list[int]:
    if not LISTS_CHILDREN:
        return child_tracking.children_of_thread(native_id)
    with contextlib.suppress(OSError):
        listing = Path(f"/proc/self/task/{native_id}/children").read_text()
        return [int(text) for text in listing.split()]
    return []


def _kill_children(native_thread_id: int, earlier: frozenset[int]) -> list[int]:
    """SIGKILL the process trees that the thread started, except the `earlier` ones; Linux only.

    This ends the wait of a thread in `subprocess.run`. Children from before the call, such as a
    persistent shell, stay. Returns the pids that were killed.
    """
    killed = [pid for pid in _children_of_thread(native_thread_id) if pid not in earlier]
    for pid in killed:
        kill_tree(pid)
    return killed


def _reap(pid: int) -> None:
    """Wait for a killed child, unless it was reaped already."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(_REAP_MS)
            os.waitpid(pid, os.WNOHANG)
        finally:
            os.close(fd)


def kill_tree(pid: int) -> None:
    """SIGKILL `pid` and its descendants; each is stopped first, so that it forks no more."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for child in _children(pid):
        kill_tree(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found if LISTS_CHILDREN else _children_by_parent(pid)


def _children_by_parent(pid: int) -> list[int]:
    """Return the children of a process on kernels that do not list them, like gVisor's."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [other for other in pids if child_tracking.parent_of(other) == pid]


class Watchdog:
    """Stops calls whose deadline has passed.

    It sleeps until the earliest deadline, and adding a call with a later deadline does not wake it.
    With the usual timeout of a minute it wakes about once a minute; in an idle instance it soon
    stops waking.

    Args:
        on_expired: Called with each expired call, in the watchdog's thread.
        sweep: Called at every wake-up; returns when it wants to be called again at the latest, on
            `time.monotonic`.
    """

    def __init__(
        self,
        on_expired: Callable[[RunningCall], None],
        sweep: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._on_expired = on_expired
        self._sweep = sweep
        self._condition = threading.Condition()
        self._calls: dict[int, RunningCall] = {}
        self._wakes_at = math.inf
        self._has_thread = False

    def add(self, call: RunningCall) -> None:
        """Watch `call` until `remove`."""
        self._calls[id(call)] = call
        if call.deadline < self._wakes_at:
            with self._condition:
                if not self._has_thread:
                    try:
                        start_thread(self._run)
                    except RuntimeError:
                        return  # the sandbox's limits allow no thread now; the next call tries
                    self._has_thread = True
                self._wakes_at = min(self._wakes_at, call.deadline)
                self._condition.notify()

    def remove(self, call: RunningCall) -> None:
        """Stop watching `call`."""
        self._calls.pop(id(call), None)

    def _run(self) -> None:
        while True:
            try:
                self._check()
            except (MemoryError, OSError, RuntimeError):
                # A tool has used up memory, descriptors or threads. No later call would have a
                # deadline if this thread ended.
                time.sleep(_WATCH_RETRY_S)

    def _check(self) -> None:
        """Stop the calls that are due, and wait for the next ones."""
        now = time.monotonic()
        for call in list(self._calls.values()):
            if call.deadline <= now:
                self._on_expired(call)  # retry if it fails
                self.remove(call)
        sweep_at = self._sweep()
        with self._condition:
            # Set before the calls are read: a call added after that sees it and notifies.
            self._wakes_at = math.inf
            deadlines = [call.deadline for call in list(self._calls.values())]
            self._wakes_at = min([*deadlines, sweep_at])
            wait_s = self._wakes_at - time.monotonic()
            if wait_s > 0:
                self._condition.wait(None if wait_s == math.inf else wait_s)
