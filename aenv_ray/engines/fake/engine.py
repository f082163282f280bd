"""An engine without processes: every sandbox is the real runtime, in threads of this process.

For tests of what stands above engines, and for measuring it: the contract's full behaviour, by the
real dispatcher and the real fast door, in about a millisecond a sandbox. It isolates nothing. What
it cannot do, and its facts say so: give tools environment variables and arguments of their own,
keep logs (output is the process's), survive a tool that calls ``os._exit``, stop a tool inside a
blocking C call.

Sandboxes belong to the process and not to the engine object: another `FakeEngine` with the same
host id attaches to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import tempfile
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import Capabilities, Engine, RunningSandbox, Sandbox, SandboxSpec, lost
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.fake.directory import base_dir
from aenv_ray.engines.fake.modules import ModuleSpace
from aenv_ray.errors import AenvError, SandboxStartFailed
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.runtime.door.calls import kill_tree
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import Connection
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.system import linux

T = TypeVar("T")

START_MODE: Final = "fresh: the fake engine starts no process"
_LONGEST_WAIT_S: Final = 60.0
"""The wall clock may be set; deadlines are looked at again after this."""
_FACTS: Final = Isolation(
    kind="thread",
    missing=(
        "the fake engine isolates nothing: its sandboxes are threads of one process",
        "network: host",
        "environment variables, arguments and output are those of the process",
    ),
)

_alive: dict[InstanceId, _Resident] = {}
_alive_changed = threading.Condition()


class FakeEngine(Engine):
    """Sandboxes as threads of this process.

    Args:
        host_id: Under which another engine of this process finds the sandboxes again.
    """

    name = "fake"
    capabilities = Capabilities(isolation="thread", network_modes=frozenset({"host"}))

    def __init__(self, host_id: HostId) -> None:
        self._host_id = host_id
        self._sandboxes: dict[InstanceId, DoorSandbox] = {}
        self._failures: list[str] = []

    # --- for tests ------------------------------------------------------------------------------

    def fail_next_start(self, reason: str) -> None:
        """Have one more start fail with `reason`; in the order of the calls."""
        self._failures.append(reason)

    def kill(self, instance_id: InstanceId) -> None:
        """End a sandbox as a crash of it would; unknown ids do nothing."""
        _end([instance_id], "it was killed")

    # --- Engine ---------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        residents: list[_Resident | AenvError] = []
        for spec in specs:
            if self._failures:
                residents.append(_start_failed(spec.instance_id, self._failures.pop(0)))
            elif spec.instance_id in _alive:
                residents.append(_start_failed(spec.instance_id, "it runs already"))
            else:
                residents.append(_Resident(spec, self._host_id))
        fresh = [r for r in residents if isinstance(r, _Resident)]
        try:
            await _in_thread(lambda: _boot_all(fresh))
            return [
                r if isinstance(r, AenvError) else r.failure or await self._connect(r)
                for r in residents
            ]
        except BaseException:
            with _alive_changed:
                for resident in fresh:
                    resident.is_cancelled.set()
            _end([r.instance_id for r in fresh], "its start was cancelled")
            raise

    async def _connect(self, resident: _Resident) -> Sandbox:
        instance_id = resident.instance_id

        async def find_cause() -> str:
            return resident.cause or "the connection to it broke"

        sandbox = DoorSandbox(instance_id, _facts(), START_MODE, find_cause)
        ours = resident.first
        resident.first = None
        if ours is None:
            ours = await _in_thread(resident.open_connection)
        await sandbox.connect(ours)
        self._sandboxes[instance_id] = sandbox
        sandbox.on_end(lambda _: self._forget(instance_id, sandbox))
        return sandbox

    def _forget(self, instance_id: InstanceId, sandbox: DoorSandbox) -> None:
        if self._sandboxes.get(instance_id) is sandbox:
            del self._sandboxes[instance_id]

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        resident = _alive.get(instance_id)
        if resident is None or resident.host_id != self._host_id:
            raise lost(instance_id, "it ended while its host was away")
        return await self._connect(resident)

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
                sandbox.end("it was released")
        await _in_thread(lambda: _end(instance_ids, "it was released"))

    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:  # noqa: D102
        resident = _alive.get(instance_id)
        if resident is None:
            raise lost(instance_id, "it does not run")
        with _alive_changed:
            resident.deadline = deadline
            _alive_changed.notify_all()

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


class _Resident:
    """One sandbox, on its own side of the door.

    Its threads share a working directory that no other thread has, where the kernel lets them.
    """

    def __init__(self, spec: SandboxSpec, host_id: HostId) -> None:
        self.instance_id = spec.instance_id
        self.host_id = host_id
        self.deadline = spec.deadline
        self.cause: str | None = None
        self.failure: SandboxStartFailed | None = None
        self.first: socket.socket | None = None
        """The starter's end of the first connection."""
        self.is_cancelled = threading.Event()
        self.work_dir = Path(tempfile.mkdtemp(dir=base_dir()))
        self._project_dir = spec.project_dir
        self._dispatcher: Dispatcher | None = None
        self._peers: list[socket.socket] = []

    def boot(self) -> None:
        """Load the project and serve; `failure` says why that was not possible."""
        if self.is_cancelled.is_set():
            shutil.rmtree(self.work_dir, ignore_errors=True)
            return
        try:
            registry = ModuleSpace(self._project_dir).load()
        except ProjectLoadError as exc:
            reason = f"the environment's code does not load: {exc}"
        except BaseException:  # noqa: BLE001  # whatever it is, the sandbox did not start
            reason = traceback.format_exc()
        else:
            self._dispatcher = Dispatcher(registry)
            with _alive_changed:
                if not self.is_cancelled.is_set():
                    self.first = self._serve()
                    _alive[self.instance_id] = self
                    _alive_changed.notify_all()
                    return
            reason = "its start was cancelled"
        self.failure = _start_failed(self.instance_id, reason)
        shutil.rmtree(self.work_dir, ignore_errors=True)

    def open_connection(self) -> socket.socket:
        """Return the other end of one more connection."""
        ends: list[socket.socket] = []
        self.run_inside(lambda: ends.append(self._serve()))
        return ends[0]

    def _serve(self) -> socket.socket:
        assert self._dispatcher is not None
        ours, theirs = socket.socketpair()
        self._peers = [peer for peer in self._peers if peer.fileno() >= 0] + [theirs]
        Connection(theirs, self._dispatcher).start()
        return ours

    def run_inside(self, function: Callable[[], None]) -> None:
        """Run `function` in a thread whose descendants have this sandbox's working directory."""

        def run() -> None:
            if has_own_directories():
                linux.unshare(linux.CLONE_FS)
                os.chdir(self.work_dir)
            function()

        thread = threading.Thread(target=run, name="aenv-fake", daemon=True)
        thread.start()
        thread.join()

    def end(self, cause: str) -> None:
        """Break every connection and stop every call; the first cause stays."""
        self.cause = self.cause or cause
        for peer in self._peers:
            with contextlib.suppress(OSError):  # its connection was closed before
                peer.shutdown(socket.SHUT_RDWR)
        if self._dispatcher is not None:
            self._dispatcher.cancel_all(cause)
        if self.first is not None:
            self.first.close()


def _boot_all(residents: Sequence[_Resident]) -> None:
    for resident in residents:
        resident.run_inside(resident.boot)
    _start_deadlines()


def _end(instance_ids: Iterable[InstanceId], cause: str) -> None:
    """End sandboxes with everything they started and wrote."""
    with _alive_changed:
        ended = [_alive.pop(i) for i in instance_ids if i in _alive]
    for resident in ended:
        resident.end(cause)
    _kill_processes_in([resident.work_dir for resident in ended])
    for resident in ended:
        shutil.rmtree(resident.work_dir, ignore_errors=True)


def _kill_processes_in(directories: Sequence[Path]) -> None:
    """Kill the processes that work below one of the directories; Linux only."""
    if not directories or not _has_started_processes() or not os.path.isdir("/proc/self"):
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            place = Path(os.readlink(f"/proc/{name}/cwd"))
            if any(place.is_relative_to(directory) for directory in directories):
                if int(name) == os.getpid():
                    continue
                kill_tree(int(name))
                os.waitpid(int(name), 0)


def _has_started_processes() -> bool:
    """Whether this process has, or ever reaped, a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > 0


@cache
def _start_deadlines() -> None:
    threading.Thread(target=_keep_deadlines, name="aenv-fake-deadlines", daemon=True).start()


def _keep_deadlines() -> None:
    clock = SystemClock()
    while True:
        with _alive_changed:
            now = clock.now()
            due = [r.instance_id for r in _alive.values() if r.deadline <= now]
            if not due:
                earliest = min((r.deadline for r in _alive.values()), default=float("inf"))
                _alive_changed.wait(min(earliest - now, _LONGEST_WAIT_S))
        _end(due, "its TTL passed")


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


def _start_failed(instance_id: InstanceId, reason: str) -> SandboxStartFailed:
    return SandboxStartFailed(f"{instance_id} did not start: {reason}", instance_id=instance_id)


@cache
def has_own_directories() -> bool:
    """Whether a thread may have a working directory of its own: Linux, where not filtered."""
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
