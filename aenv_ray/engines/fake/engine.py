"""An engine without processes: every sandbox is the real runtime in threads of this process.

For tests and benchmarks of the layers above engines. It uses the real dispatcher and the real fast
door and starts a sandbox in about a millisecond. It isolates nothing, as its facts say: sandboxes
share environment variables, arguments and output with the process, a tool that calls ``os._exit``
ends the process, and a tool in a blocking C call cannot be stopped.

Sandboxes belong to the process, not to the engine object: another `FakeEngine` with the same host
id attaches to them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import resource
import select
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import (
    Capabilities,
    EndCause,
    Engine,
    RunningSandbox,
    Sandbox,
    SandboxSpec,
    lost,
    start_failed,
)
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.fake.modules import ModuleSpace
from aenv_ray.errors import AenvError, InsideCause, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.answers import EncodedOutcome
from aenv_ray.runtime.door.caller import Caller
from aenv_ray.runtime.door.calls import kill_tree
from aenv_ray.runtime.door.dispatch import Dispatcher, OnOutcome, OnToolProgress
from aenv_ray.runtime.door.door import Connection
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system.threads import start_thread

T = TypeVar("T")

PREFIX: Final = "aenv-threads-"
_LOCK: Final = "lock"
START_MODE: Final = "fresh: the fake engine starts no process"
_RELEASED: Final = EndCause("it was released")
_LONGEST_WAIT_S: Final = 60.0
"""Deadlines are checked at least this often, because the wall clock may be set."""
_READERS: Final = 8
"""Threads that serve connections, unless all of them run calls for longer than `_STUCK_S`."""
_STUCK_S: Final = 0.02
_FACTS: Final = Isolation(
    kind="thread",
    missing=(
        "the fake engine isolates nothing: its sandboxes are threads of one process",
        "network: host",
        "environment variables, arguments and output are those of the process",
    ),
)

_alive: dict[InstanceId, _FakeRuntime] = {}
_alive_changed = threading.Condition()
_looks_at = [float("inf")]
"""When deadlines are checked next, on the wall clock; changed under `_alive_changed`."""


class FakeEngine(Engine):
    """Sandboxes as threads of this process.

    Args:
        host_id: Another engine of this process with this id can attach to the sandboxes.
    """

    name = "fake"
    capabilities = Capabilities(isolation="thread", network_modes=frozenset({"host"}))

    def __init__(self, host_id: HostId) -> None:
        self._host_id = host_id
        self._sandboxes: dict[InstanceId, DoorSandbox] = {}

    # --- for tests ------------------------------------------------------------------------------

    def kill(self, instance_id: InstanceId, inside: InsideCause | None = None) -> None:
        """End a sandbox as a crash would; ignores unknown ids.

        Args:
            instance_id: The id of the sandbox.
            inside: What in the sandbox ended it. None: it was killed from outside.
        """
        _end([instance_id], EndCause("it was killed", inside))

    # --- Engine ---------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        runtimes: list[_FakeRuntime | AenvError] = []
        for spec in specs:
            if spec.instance_id in _alive:
                runtimes.append(start_failed(spec.instance_id, "it is already running"))
            else:
                runtimes.append(_FakeRuntime(spec, self._host_id))
        fresh = [r for r in runtimes if isinstance(r, _FakeRuntime)]
        try:
            await _in_thread(lambda: _boot_all(fresh))
            return [
                r if isinstance(r, AenvError) else r.failure or await self._connect(r)
                for r in runtimes
            ]
        except BaseException:
            with _alive_changed:
                for runtime in fresh:
                    runtime.is_cancelled.set()
            _end([r.instance_id for r in fresh], EndCause("its start was cancelled"))
            raise

    async def _connect(self, runtime: _FakeRuntime) -> Sandbox:
        instance_id = runtime.instance_id

        async def find_cause() -> EndCause:
            return runtime.cause or EndCause("the connection to it broke", InsideCause.CONNECTION)

        async def dial() -> socket.socket:
            ours, runtime.first = runtime.first, None
            return ours or await runtime.open_connection()

        sandbox = DoorSandbox(instance_id, _facts(), START_MODE, find_cause, dial=dial)
        await sandbox.open()
        self._sandboxes[instance_id] = sandbox
        sandbox.on_end(lambda _: self._forget(instance_id, sandbox))
        return sandbox

    def _forget(self, instance_id: InstanceId, sandbox: DoorSandbox) -> None:
        if self._sandboxes.get(instance_id) is sandbox:
            del self._sandboxes[instance_id]

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        runtime = _alive.get(instance_id)
        if runtime is None or runtime.host_id != self._host_id:
            raise lost(instance_id, "it ended while its host was away")
        return await self._connect(runtime)

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        return [
            RunningSandbox(r.instance_id, r.host_id, r.deadline)
            for r in list(_alive.values())
            if r.host_id == self._host_id
        ]

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        for instance_id in instance_ids:
            sandbox = self._sandboxes.get(instance_id)
            if sandbox is not None:
                sandbox.end(_RELEASED)
        await _in_thread(lambda: _end(instance_ids, _RELEASED))

    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:  # noqa: D102
        runtime = _alive.get(instance_id)
        if runtime is None:
            raise lost(instance_id, "it does not run")
        with _alive_changed:
            runtime.deadline = deadline
            _note_deadline(deadline)

    def logs(  # noqa: D102
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        del tail_lines
        sandbox = self._sandboxes.get(instance_id)
        if sandbox is None:
            raise lost(instance_id, "it does not run")
        return _no_output(sandbox if follow else None)

    async def close(self) -> None:  # noqa: D102
        for sandbox in list(self._sandboxes.values()):
            await sandbox.close()
        self._sandboxes.clear()


class _FakeRuntime:
    """The runtime of one sandbox, in threads of this process.

    If the kernel allows it, these threads have their own working directory.
    """

    def __init__(self, spec: SandboxSpec, host_id: HostId) -> None:
        self.instance_id = spec.instance_id
        self.host_id = host_id
        self.deadline = spec.deadline
        self.cause: EndCause | None = None
        self.failure: SandboxStartFailed | None = None
        self.first: socket.socket | None = None
        """The engine's end of the first connection."""
        self.is_cancelled = threading.Event()
        self.work_dir = Path(tempfile.mkdtemp(dir=base_dir()))
        self._directory = str(self.work_dir)
        self._project_dir = spec.project_dir
        self._variables = spec.environment_variables
        self._dispatcher: Dispatcher | None = None
        self._peers: list[socket.socket] = []

    def boot(self) -> None:
        """Load the project and serve; sets `failure` if that is not possible."""
        if self.is_cancelled.is_set():
            shutil.rmtree(self.work_dir, ignore_errors=True)
            return
        try:
            registry = ModuleSpace(self._project_dir).load()
        except ProjectLoadError as exc:
            reason = f"the environment's code does not load: {exc}"
        except BaseException:  # noqa: BLE001  # any failure of the project's code
            reason = traceback.format_exc()
        else:
            self.note_directory(str(self.work_dir))  # the project's code may have changed it
            self._dispatcher = _DirectoryDispatcher(registry, self)
            self._dispatcher.begin(directory=str(self.work_dir), variables=self._variables)
            with _alive_changed:
                if not self.is_cancelled.is_set():
                    self.first = self._serve()
                    _alive[self.instance_id] = self
                    _note_deadline(self.deadline)
                    return
            reason = "its start was cancelled"
        self.failure = start_failed(self.instance_id, reason)
        shutil.rmtree(self.work_dir, ignore_errors=True)

    async def open_connection(self) -> socket.socket:
        """Return the client's end of a new connection."""
        if polled_connections() is not None:
            return self._serve()
        return await _in_thread(self._serve)

    def _serve(self) -> socket.socket:
        assert self._dispatcher is not None
        ours, theirs = socket.socketpair()
        self._peers = [peer for peer in self._peers if peer.fileno() >= 0] + [theirs]
        polled = polled_connections()
        Connection(theirs, self._dispatcher, polled).start()
        return ours

    def note_directory(self, earlier: str) -> None:
        """Make the calling thread's directory the sandbox's if it is no longer `earlier`."""
        with contextlib.suppress(FileNotFoundError):  # the sandbox has ended
            if (directory := os.getcwd()) != earlier:
                self._directory = directory

    def enter_directory(self) -> str:
        """Give the calling thread this sandbox's working directory, apart from other threads."""
        directory = self._directory
        if has_own_directories():
            linux.unshare(linux.CLONE_FS)
            with contextlib.suppress(FileNotFoundError):  # the sandbox has ended
                os.chdir(directory)
        return directory

    def end(self, cause: EndCause) -> None:
        """Break every connection and stop every call; only the first cause counts."""
        self.cause = self.cause or cause
        for peer in self._peers:
            with contextlib.suppress(OSError):  # the peer closed it
                peer.shutdown(socket.SHUT_RDWR)
        if self._dispatcher is not None:
            self._dispatcher.cancel_all(cause.text)
        if self.first is not None:
            self.first.close()


class _DirectoryDispatcher(Dispatcher):
    """Runs each sync call in its sandbox's working directory, whichever thread it has.

    Args:
        registry: The functions.
        runtime: The runtime of the sandbox.
    """

    def __init__(self, registry: Registry, runtime: _FakeRuntime) -> None:
        super().__init__(registry)
        self._runtime = runtime

    def submit(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnToolProgress | None = None,
        caller: Caller | None = None,
    ) -> None:
        visit = _Visit(self._runtime, on_outcome)
        visit.begin()
        super().submit(method, params, visit.end, on_progress, caller)

    def accept(
        self,
        method: str,
        params: Mapping[str, Any],
        on_outcome: OnOutcome,
        on_progress: OnToolProgress | None = None,
        caller: Caller | None = None,
    ) -> Callable[[], None] | None:
        visit = _Visit(self._runtime, on_outcome)
        run = super().accept(method, params, visit.end, on_progress, caller)
        if run is None:
            return None

        def run_inside() -> None:
            visit.begin()
            run()

        return run_inside


class _Visit:
    """A call's stay in the working directory of its sandbox."""

    def __init__(self, runtime: _FakeRuntime, on_outcome: OnOutcome) -> None:
        self._runtime = runtime
        self._on_outcome = on_outcome
        self._directory = ""
        self._thread: int | None = None

    def begin(self) -> None:
        """Enter the directory with the calling thread."""
        self._directory = self._runtime.enter_directory()
        self._thread = threading.get_ident()

    def end(self, outcome: EncodedOutcome) -> None:
        """Report the outcome, once a change of the directory is noted."""
        if threading.get_ident() == self._thread:  # not the loop of async tools, nor a deadline's
            self._runtime.note_directory(self._directory)
        self._on_outcome(outcome)


@cache
def base_dir() -> Path:
    """Return the directory of this process's sandboxes; it is removed when the process ends.

    The next process removes it if this one is killed.
    """
    directory = claim_directory(Path(tempfile.gettempdir()))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def claim_directory(parent: Path) -> Path:
    """Return a new directory that is locked while this process runs; remove unlocked ones."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                lock = FileLock.try_acquire(path / _LOCK)
                if lock is not None:
                    with lock:
                        shutil.rmtree(path, ignore_errors=True)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            if FileLock.try_acquire(directory / _LOCK) is not None:
                return directory


def _boot_all(runtimes: Sequence[_FakeRuntime]) -> None:
    def boot() -> None:
        for runtime in runtimes:
            runtime.enter_directory()
            runtime.boot()

    thread = threading.Thread(target=boot, name="aenv-fake", daemon=True)
    thread.start()
    thread.join()
    _start_deadlines()


def _end(instance_ids: Iterable[InstanceId], cause: EndCause) -> None:
    """End sandboxes with their processes and files."""
    with _alive_changed:
        ended = [_alive.pop(i) for i in instance_ids if i in _alive]
    for runtime in ended:
        runtime.end(cause)
    _kill_processes_in([runtime.work_dir for runtime in ended])
    for runtime in ended:
        shutil.rmtree(runtime.work_dir, ignore_errors=True)


def _kill_processes_in(directories: Sequence[Path]) -> None:
    """Kill processes whose working directory is below one of `directories`; Linux only."""
    if not directories or not _has_started_processes() or not os.path.isdir("/proc/self"):
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            cwd = Path(os.readlink(f"/proc/{name}/cwd"))
            if any(cwd.is_relative_to(directory) for directory in directories):
                if int(name) == os.getpid():
                    continue
                kill_tree(int(name))
                os.waitpid(int(name), 0)


def _has_started_processes() -> bool:
    """Return whether this process has or had a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > 0


@cache
def _start_deadlines() -> None:
    threading.Thread(target=_keep_deadlines, name="aenv-fake-deadlines", daemon=True).start()


def _note_deadline(deadline: float) -> None:
    """Schedule a check for a new deadline; the caller holds `_alive_changed`."""
    if deadline < _looks_at[0]:
        _alive_changed.notify_all()


def _keep_deadlines() -> None:
    clock = SystemClock()
    while True:
        with _alive_changed:
            now = clock.now()
            due = [r.instance_id for r in _alive.values() if r.deadline <= now]
            if not due:
                earliest = min((r.deadline for r in _alive.values()), default=float("inf"))
                _looks_at[0] = min(earliest, now + _LONGEST_WAIT_S)
                _alive_changed.wait(_looks_at[0] - now)
        _end(due, EndCause("its TTL passed"))


async def _no_output(until_end_of: Sandbox | None) -> AsyncGenerator[bytes, None]:
    if until_end_of is not None:
        ended = asyncio.Event()
        until_end_of.on_end(lambda _: ended.set())
        await ended.wait()
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


async def _in_thread(function: Callable[[], T]) -> T:
    return await asyncio.to_thread(function)


@cache
def has_own_directories() -> bool:
    """Return whether a thread can have its own working directory: on Linux, unless filtered."""
    answers: list[bool] = []

    def probe() -> None:
        try:
            linux.unshare(linux.CLONE_FS)
        except (OSError, AttributeError):
            answers.append(False)
        else:
            answers.append(True)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return answers[0]


@cache
def _facts() -> Isolation:
    if has_own_directories():
        return _FACTS
    shared = "the working directory is that of the process"
    return _FACTS.model_copy(update={"missing": (*_FACTS.missing, shared)})


class PolledConnections:
    """Serves the connections of all sandboxes when they can be read; an `IdleConnections`.

    Linux only. A thread for each of thousands of connections would make every burst of calls a
    contest of as many threads for Python's lock.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, Connection] = {}
        """By file descriptor."""
        self._readable: deque[Connection] = deque()
        self._changed = threading.Condition()
        self._waiting = 0
        """Threads that wait for a readable connection."""
        self._threads = 0
        self._served = 0
        """Connections that threads have taken so far."""
        start_thread(self._wait_for_ever)

    def watch(self, connection: Connection, fileno: int) -> None:
        """See `IdleConnections.watch`."""
        self._watched[fileno] = connection
        events = select.EPOLLIN | select.EPOLLONESHOT
        try:
            self._poll.register(fileno, events)
        except FileExistsError:
            self._poll.modify(fileno, events)

    def _wait_for_ever(self) -> None:
        checked_at, checked = 0.0, 0
        while True:
            events = self._poll.poll(_STUCK_S if self._readable else None)
            with self._changed:
                found = [self._watched.pop(fileno, None) for fileno, _ in events]
                self._readable += [connection for connection in found if connection is not None]
                self._changed.notify(len(found))
                missing = len(self._readable) - self._waiting
                grow = min(missing, _READERS - self._threads)
                if missing > 0 >= grow and time.monotonic() - checked_at > _STUCK_S:
                    if self._served == checked:
                        grow = min(missing, self._threads)
                    checked_at, checked = time.monotonic(), self._served
                self._threads += max(0, grow)
            for _ in range(grow):
                self._start_thread()

    def _start_thread(self) -> None:
        try:
            start_thread(self._serve)
        except RuntimeError:  # the system allows no more threads now; the existing ones continue
            with self._changed:
                self._threads -= 1

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._waiting >= _READERS:
                    self._threads -= 1
                    return
                self._waiting += 1
                self._changed.wait_for(lambda: self._readable)
                self._waiting -= 1
                self._served += 1
                connection = self._readable.popleft()
            connection.serve()


@cache
def polled_connections() -> PolledConnections | None:
    """Return what watches the connections of this process; None where it cannot be done."""
    return PolledConnections() if sys.platform == "linux" else None
