"""A template process: loads an environment's code once, and forks instances from it.

``python -m aenv_ray.runtime.fork.template FD`` talks to the node's launcher over the
``SOCK_SEQPACKET`` socket FD, with one JSON object per packet:

    launcher → template   {"setup": …}                     once, first
                          {"spares": n, "prefault": b}     fork n more; b is false in a burst
                          {"kill": n}                      end process n and its descendants
                          {"ping": x}                      answer {"pong": x}
    template → launcher   {"ready": facts …} | {"failed": text, …} | {"jail_unavailable": why}, once
                          {"spare": n} + [channel]         process n waits at the other end
                          {"no_spare": text}               one could not be forked
                          {"exited": n, "status": s}
    launcher → spare      {"id": id, …} + [listener, log]  become this instance
    instance → launcher   {"booted": id} | {"boot_failed": id, "error": text}, on the template's FD

The launcher orders spares (`aenv_ray.runtime.fork.spare`) ahead of need and gives them their
assignments itself. So a create waits neither for a fork nor for this process, whose every write
after a fork copies a page.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime.api.registry import get_registry
from aenv_ray.runtime.door.calls import kill_tree, retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork.jail_spec import (
    PROJECT,
    JailSpec,
    JailUnavailable,
    StorageUnavailable,
    facts,
)
from aenv_ray.runtime.fork.namespaces import NetworkNamespaces, TemplateNamespaces
from aenv_ray.runtime.fork.preload import preload, variables_read
from aenv_ray.runtime.fork.spare import PACKET_BYTES, FirstCall, Spare, receive
from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system.reaper import children_of_main_thread, reap_adopted
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

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._spec = JailSpec("")
        self._jailed = False
        self._project = ""
        self._children: dict[int, _Child] = {}
        self._forked = 0
        """Number of processes forked so far; the launcher identifies them by number."""
        self._owed = 0
        """Spares that the launcher has ordered and that are not forked yet."""
        self._prefaults = True
        self._namespaces: TemplateNamespaces | None = None
        self._networks = NetworkNamespaces()
        self._first_call = FirstCall()  # before the project, which may change modules
        self._on_child_signal: Callable[..., object] = lambda *_: None
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Set up, report, and fork until the launcher is gone."""
        for stream in (sys.stdout, sys.stderr):  # before the project may replace them
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
        setup = self._receive()["setup"]
        self._spec = JailSpec(**setup["jail"])
        try:
            self._isolate(setup)
        except JailUnavailable as exc:
            # This process cannot go back: the launcher starts another one without a jail.
            self._send({"jail_unavailable": str(exc)})
            return
        except StorageUnavailable as exc:
            self._send({"failed": str(exc), "env_reads": []})
            return
        isolation = facts(self._spec, jailed=self._jailed, reason=setup["reason"])
        report: dict[str, Any] = {"isolation": isolation.data(), "pid": os.getpid()}
        dispatcher, hides_source_late = None, False
        if setup["preload"]:
            try:
                report |= preload(self._project)
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
        jail.warm_up()
        retry_lost_interrupts()
        self._spare = Spare(
            control=self._control,
            spec=self._spec,
            jailed=self._jailed,
            project=self._project,
            dispatcher=dispatcher,
            hides_source_late=hides_source_late,
            first_call=self._first_call,
        )
        self._forker = Forker()  # after all imports: modules register fork hooks
        gc.collect()
        gc.freeze()  # the garbage collector of a child does not touch, and so copy, these objects
        self._send({"ready": report})
        self._serve()

    # --- setting up -------------------------------------------------------------------------

    def _isolate(self, setup: dict[str, Any]) -> None:
        """Build the jail, unless the launcher knows that none is available here."""
        linux.die_with_parent()
        os.umask(0o022)  # the sandbox may run as another user, and must read these files
        if setup["isolated"]:
            self._enter_namespaces(setup)
            self._jailed = True
            self._project = PROJECT
        else:
            self._project = self._spec.project
            linux.become_subreaper()

    def _enter_namespaces(self, setup: dict[str, Any]) -> None:
        jail.unshare_template(Path(setup["scratch"]), self._spec)
        # The process that unshared stays outside the pid namespace; its child is pid 1 there.
        if (pid := os.fork()) != 0:
            self._control.close()
            _exit_like(pid)
        linux.die_with_parent()
        jail.settle_template(os.environ["envNAME"])  # noqa: SIM112  # AEnvironment's name for it
        self._namespaces = TemplateNamespaces(self._spec)

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
            # Messages come before forks that are owed: a release must not wait for forks.
            for fd, _ in poll.poll(0 if self._owed else None):
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                else:
                    self._handle(self._receive())
            if self._owed:
                self._owed -= 1
                try:
                    self._make_spare()
                except OSError as exc:
                    # Out of processes, namespaces or descriptors: existing instances run on.
                    self._send({"no_spare": _fork_failure(exc)})

    def _handle(self, message: dict[str, Any]) -> None:
        if "spares" in message:
            self._owed += message["spares"]
            self._prefaults = message["prefault"]
        elif "kill" in message:
            child = self._children.get(message["kill"])
            if child is None:
                return
            if self._jailed:
                os.kill(child.pid, signal.SIGKILL)  # pid 1 of its namespace: ends all others too
            else:
                kill_tree(child.pid)
        elif "ping" in message:
            self._send({"pong": message["ping"]})

    def _make_spare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
            child = self._fork(ours, theirs)
            self._forked += 1
            self._children[self._forked] = child
            socket.send_fds(self._control, [b'{"spare":%d}' % self._forked], [ours.fileno()])

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> _Child:
        network = pid = -1
        try:
            if self._namespaces is not None:
                network = jail.build(self._spec, self._networks)
            pid = self._forker.fork()
            if pid == 0:
                ours.close()  # with this end open, the spare would never see it close
                self._spare.run(theirs, self._stop_serving, prefaults=self._prefaults)
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
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _reap(self) -> None:
        numbers = {child.pid: number for number, child in self._children.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            number = numbers.get(pid)
            if number is not None:
                self._networks.leave(self._children.pop(number).network)
                self._send({"exited": number, "status": os.waitstatus_to_exitcode(status)})
        if not self._jailed:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill processes of dead instances, which this process adopts as subreaper."""
        known = {child.pid for child in self._children.values()}
        for pid in children_of_main_thread():
            if pid not in known:
                kill_tree(pid)

    def _receive(self) -> dict[str, Any]:
        data, _ = receive(self._control)
        if not data:
            raise SystemExit(0)  # the launcher is gone; this ends all instances of the template
        message: dict[str, Any] = json.loads(data)
        return message

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


def _exit_like(pid: int) -> NoReturn:
    """Wait for a child and exit with its code."""
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(pid, 0)
            os._exit(max(0, os.waitstatus_to_exitcode(status)) & 0xFF)


def _reopen_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if the project closed them: no socket may get these numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def main() -> None:
    """Run a template on the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv.pop(1)))  # not an argument of the project's code
    control.set_inheritable(False)
    Template(control).run()


if __name__ == "__main__":
    main()
