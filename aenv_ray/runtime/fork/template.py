"""A template process: loads an environment's code once, and forks instances from it.

``python -m aenv_ray.runtime.fork.template ORDER FD [FD]`` is executed by the jailer, which has
isolated the process already. It talks to the node's launcher over the ``SOCK_SEQPACKET`` socket FD,
with one JSON object per packet:

    launcher → jailer    {"setup": …}                         once, first
    jailer → launcher    {"isolation": facts} | {"jail_unavailable": why} | {"failed": …}, once
    template → launcher  {"ready": report} | {"failed": text, …}, once
    launcher → template  {"spares": [n, …], "prefault": b} + [channels]
                         fork one for each channel; b is false in a burst
    template → launcher  {"exited": n, "status": s}           why process n ended

Each fork has a channel of the same kind:

    spare → launcher     {"waits": true} | {"no_spare": text} the kernel adds its process id
    launcher → spare     {"id": id, …} + [listener, log]      become this instance
    instance → launcher  {"booted": true} | {"boot_failed": text}

The launcher orders spares (`aenv_ray.runtime.fork.spare`) ahead of need, gives them their
assignments, and ends them itself. So a create waits neither for a fork nor for this process, whose
every write after a fork copies a page; and since the project's code can change all that this
process says and does, nothing that others rely on depends on it.

A *bare* template does not load the project; its instances do, after the fork. It serves code that
starts threads or opens connections when it is imported, or that then reads variables that differ
between instances.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from aenv_ray.runtime.api.registry import get_registry
from aenv_ray.runtime.door.calls import kill_tree, retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import PROJECT, JailSpec
from aenv_ray.runtime.fork.namespaces import NetworkNamespaces, TemplateNamespaces
from aenv_ray.runtime.fork.preload import (
    opened_files,
    preload,
    variables_read,
    with_position,
)
from aenv_ray.runtime.fork.spare import FirstCall, Spare, receive
from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system.reaper import (
    children_of_main_thread,
    reap_adopted,
    used_up_cpu_limit,
)
from aenv_ray.runtime.system.signals import ignore_signals_from_inside
from aenv_ray.runtime.system.threads import process_limits

TEMPLATE_NAME: Final = "aenv-template"
"""Name of a template, and of a fork before it is a spare, in the process table."""


@dataclass
class _Child:
    """A process forked from this template."""

    pid: int
    network: int = -1
    """Descriptor of its network namespace; -1 for none."""


class Template:
    """The fork server. Single-threaded, since a fork copies only the thread that forks."""

    def __init__(
        self, order: dict[str, Any], control: socket.socket, jailer: socket.socket | None
    ) -> None:
        self._control = control
        self._spec = JailSpec(**order["jail"])
        self._preloads: bool = order["preload"]
        self._jailed: bool = order["jailed"]
        self._project = PROJECT if self._jailed else self._spec.project
        self._children: dict[int, _Child] = {}
        self._owed: deque[tuple[int, int]] = deque()
        """Numbers and channels of the spares that are ordered and not forked yet."""
        self._prefaults = True
        self._namespaces = TemplateNamespaces(self._spec) if self._jailed else None
        self._networks = NetworkNamespaces(jailer)
        self._first_call = FirstCall()  # before the project, which may change modules
        self._on_child_signal: Callable[..., object] = lambda *_: None
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Load the project, report, and fork until the launcher is gone."""
        if not self._jailed:
            linux.become_subreaper()
        for stream in (sys.stdout, sys.stderr):  # before the project may replace them
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
        report: dict[str, Any] = {}
        dispatcher, hides_source_late = None, False
        files = opened_files()
        if self._preloads:
            try:
                report = preload(self._project)
            except ProjectLoadError as exc:
                self._send({"failed": str(exc), "env_reads": variables_read()})
                return
            dispatcher = Dispatcher(get_registry())
        elif self._spec.hide_source:
            # Instances hide the project after they have loaded it, rather than `jail.build`.
            hides_source_late = self._jailed
            self._spec = replace(self._spec, hide_source=False)
        os.environ.pop("PYTHONPATH", None)  # the runtime's, not for processes that tools start
        _reopen_standard_descriptors()
        linux.set_process_name(TEMPLATE_NAME)
        jail.warm_up(jailed=self._jailed)
        retry_lost_interrupts()
        if self._jailed:
            ignore_signals_from_inside()
        kept = sorted(opened_files() - files)
        self._spare = Spare(
            spec=self._spec,
            jailed=self._jailed,
            project=self._project,
            dispatcher=dispatcher,
            hides_source_late=hides_source_late,
            first_call=self._first_call,
            kept=tuple(kept),
            files=() if report.get("bare_reason") else tuple(with_position(kept)),
        )
        self._first_call.rehearse()
        self._forker = Forker()  # after all imports: modules register fork hooks
        gc.collect()
        gc.freeze()  # the garbage collector of a child does not touch, and so copy, these objects
        self._send({"ready": report})
        self._serve()

    # --- serving ----------------------------------------------------------------------------

    def _serve(self) -> None:
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: self._on_child_signal())
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll(0 if self._owed else None):
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                else:
                    self._take_orders()
            if self._owed:
                self._make_spare(*self._owed.popleft())

    def _take_orders(self) -> None:
        data, channels = receive(self._control)
        if not data:
            raise SystemExit(0)  # the launcher is gone; this ends all instances of the template
        order = json.loads(data)
        self._owed.extend(zip(order["spares"], channels, strict=False))
        self._prefaults = order["prefault"]

    def _make_spare(self, number: int, channel: int) -> None:
        try:
            self._children[number] = self._fork(channel)
        except OSError as exc:
            # Out of processes, namespaces or descriptors: existing instances run on.
            with socket.socket(fileno=os.dup(channel)) as refused:
                refused.send(json.dumps({"no_spare": _fork_failure(exc)}).encode())
        finally:
            os.close(channel)

    def _fork(self, channel: int) -> _Child:
        network = pid = -1
        try:
            if self._namespaces is not None:
                network = jail.build(self._spec, self._networks)
            pid = self._forker.fork()
            if pid == 0:
                self._stop_serving()
                self._spare.run(channel, prefaults=self._prefaults)
        except OSError:
            self._networks.leave(network)
            raise
        finally:
            if self._namespaces is not None and pid != 0:
                self._namespaces.rejoin()
        return _Child(pid, network)

    def _stop_serving(self) -> None:
        """In a forked process: give up what only the template does."""
        signal.set_wakeup_fd(-1)
        # Setting another handler with `signal.signal` would create enums: about 80 pages to copy.
        self._on_child_signal = reap_adopted

    def _reap(self) -> None:
        numbers = {child.pid: number for number, child in self._children.items()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            number = numbers.get(ended.si_pid)
            is_over_limit = number is not None and used_up_cpu_limit(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if number is not None:
                self._networks.leave(self._children.pop(number).network)
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL and is_over_limit:
                    code = -signal.SIGXCPU
                self._send({"exited": number, "status": code})
        if not self._jailed:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill processes of dead instances, which this process adopts as subreaper."""
        known = {child.pid for child in self._children.values()}
        for pid in children_of_main_thread():
            if pid not in known:
                kill_tree(pid)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())


class Forker:
    """Forks this process, which has one thread, without the fork hooks that are for threads.

    At every fork `threading` and `logging` repair, in Python, locks that other threads may hold. In
    the child this copies about 100 pages, a sixth of what it costs to become an instance. Hooks of
    other modules, the environment's among them, always run.

    Create it after all modules are imported.
    """

    def __init__(self) -> None:
        self._skips_hooks = False
        for hooks in _fork_hooks():
            for index, hook in enumerate(hooks):
                if getattr(hook, "__module__", "") in _MODULES_WITH_THREAD_HOOKS:
                    hooks[index] = functools.partial(self._run_hook, hook)

    def fork(self) -> int:
        """Fork as `os.fork` does; `os.fork` itself, also in the child, still runs all hooks."""
        self._skips_hooks = True
        try:
            return os.fork()
        finally:
            self._skips_hooks = False

    def _run_hook(self, hook: Callable[[], object]) -> None:
        if not self._skips_hooks:
            hook()


_MODULES_WITH_THREAD_HOOKS: Final = frozenset({"logging", "threading"})


def _fork_hooks() -> list[list[Any]]:
    """Return the interpreter's own lists of fork hooks, which can be changed in place.

    Python has no API for them: they are found as the lists that refer to a newly registered hook.
    An interpreter that stores hooks otherwise yields no lists, and its forks run all hooks.
    """

    def before() -> None: ...
    def in_child() -> None: ...
    def in_parent() -> None: ...

    os.register_at_fork(before=before, after_in_child=in_child, after_in_parent=in_parent)
    found = []
    for mark in (before, in_child, in_parent):
        for holder in gc.get_referrers(mark):
            if type(holder) is list and holder and holder[-1] is mark:
                del holder[-1]
                found.append(holder)
    return found


def _fork_failure(exc: OSError) -> str:
    """Return why a process could not be forked, with the limit that was reached."""
    return f"{exc} ({process_limits()})" if exc.errno == errno.EAGAIN else str(exc)


def _reopen_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if the project closed them: no socket may get these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def main() -> None:
    """Run a template; the arguments are an order of the jailer and the descriptors of sockets."""
    order, *fds = sys.argv[1:]
    del sys.argv[1:]  # not arguments of the project's code
    sockets = [socket.socket(fileno=int(fd)) for fd in fds]
    for sock in sockets:
        sock.set_inheritable(False)
    Template(json.loads(order), sockets[0], sockets[1] if len(sockets) > 1 else None).run()


if __name__ == "__main__":
    main()
