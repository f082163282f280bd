"""A template process: an environment's code, loaded once, from which instances are forked.

``python -m aenv_ray.runtime.fork.template FD`` speaks with the node's launcher over the
``SOCK_SEQPACKET`` socket FD, one JSON object a packet:

    launcher → template   {"setup": …}                   once, first
                          {"spares": n, "rehearse": b}   make more; in a burst they rehearse nothing
                          {"kill": n}                    end process n and all it started
                          {"ping": x}                    say {"pong": x}
    template → launcher   {"ready": facts …} | {"failed": text, …} | {"jail_unavailable": why}, once
                          {"spare": n} + [channel]       process n waits at the other end
                          {"no_spare": text}             one could not be made
                          {"exited": n, "status": s}
    launcher → spare      {"id": id, …} + [listener, log]  become this instance
    instance → launcher   {"booted": id} | {"boot_failed": id, "error": text}, by the template's FD

A *spare* is a forked process behind its walls in which none of the environment's functions ran yet.
The launcher orders them ahead, and gives each its instance itself: a create waits for no fork, and
not for this process, whose every write after a fork copies a page. A spare that waits rehearses a
call, so that the pages which a first call touches are its own when that call comes.

A *bare* template does not load the project; its instances do, after the fork. That serves code
that starts threads or opens connections when it is imported, or reads variables then that differ
between instances.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import pydantic_core

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import get_registry
from aenv_ray.runtime.door.calls import kill_tree, retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.fork import jail
from aenv_ray.runtime.fork import namespaces as jail_spaces
from aenv_ray.runtime.fork.forks import Forks
from aenv_ray.runtime.fork.jail_spec import (
    PROJECT,
    STORAGE,
    WORK,
    JailSpec,
    JailUnavailable,
    StorageUnavailable,
    facts,
)
from aenv_ray.runtime.fork.prefault import Rehearsal
from aenv_ray.runtime.fork.preload import preload, variables_read
from aenv_ray.runtime.system import linux, storage_lock
from aenv_ray.runtime.system.reaper import Acceptor, children_of_main_thread, reap_adopted
from aenv_ray.runtime.system.threads import process_limits

PACKET_BYTES: Final = 1 << 20
TEMPLATE_NAME: Final = "aenv-template"
"""What the process table calls a template, and a fork of it that is nothing yet."""
SPARE_NAME: Final = "aenv-spare"
"""What the process table calls a process that is no instance yet."""
INSTANCE_NAME: Final = "aenv-instance"
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE


@dataclass
class _Child:
    """A process forked from this template."""

    pid: int
    network: int = -1
    """Descriptor of its network namespace; -1 for none."""


class Template:
    """The fork server. Single-threaded: a fork copies only the thread that forks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._spec = JailSpec("")
        self._jailed = False
        self._preloaded = False
        self._covers_late = False
        self._project = ""
        self._children: dict[int, _Child] = {}
        self._made = 0
        self._owed = 0
        self._rehearses = True
        self._home: jail_spaces.Home | None = None
        self._networks = jail_spaces.Networks()
        self._dispatcher: Dispatcher | None = None
        self._rehearsal = Rehearsal()
        self._on_child_signal: Callable[..., object] = lambda *_: None
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Set up, report, and fork until the launcher is gone."""
        for stream in (sys.stdout, sys.stderr):  # before code that may put others in their place
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
        setup = self._receive()[0]["setup"]
        self._spec = JailSpec(**setup["jail"])
        try:
            self._isolate(setup)
        except JailUnavailable as exc:
            # Half-way in, this process cannot go back: the launcher starts another without a jail.
            self._send({"jail_unavailable": str(exc)})
            return
        except StorageUnavailable as exc:
            self._send({"failed": str(exc), "env_reads": []})
            return
        isolation = facts(self._spec, jailed=self._jailed, reason=setup["reason"])
        report: dict[str, Any] = {"isolation": isolation.data(), "pid": os.getpid()}
        self._preloaded = bool(setup["preload"])
        if self._preloaded:
            try:
                report |= preload(self._project)
            except ProjectLoadError as exc:
                self._send({"failed": str(exc), "env_reads": variables_read()})
                return
            self._dispatcher = Dispatcher(get_registry())
        elif self._spec.hide_source:
            # Its instances load the project themselves: it is covered after that, not before.
            self._covers_late = self._jailed
            self._spec = replace(self._spec, hide_source=False)
        os.environ.pop("PYTHONPATH", None)  # the runtime's own, not for what tools start
        _keep_standard_descriptors()
        linux.set_process_name(TEMPLATE_NAME)
        jail.warm_up()
        retry_lost_interrupts()
        self._forks = Forks()  # what was imported until now has told its wishes at forks
        gc.collect()
        gc.freeze()  # what is here now stays shared: the collector of a child does not touch it
        self._send({"ready": report})
        self._serve()

    # --- setting up -------------------------------------------------------------------------

    def _isolate(self, setup: dict[str, Any]) -> None:
        """Build the jail, unless the launcher says that there is none to be had here."""
        linux.die_with_parent()
        os.umask(0o022)  # what the launcher shows must be readable by whom the sandbox runs as
        if setup["isolated"]:
            self._enter_template(setup)
            self._jailed = True
            self._project = PROJECT
        else:
            self._project = self._spec.project
            linux.become_subreaper()

    def _enter_template(self, setup: dict[str, Any]) -> None:
        jail.unshare_template(Path(setup["scratch"]), self._spec)
        # The process that unshared stays outside its pid namespace; its child is pid 1 there.
        if (pid := os.fork()) != 0:
            self._control.close()
            _follow(pid)
        linux.die_with_parent()
        jail.settle_template(os.environ["envNAME"])  # noqa: SIM112  # AEnvironment's name for it
        self._home = jail_spaces.Home(self._spec)

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
            # What is asked goes before what is owed: a release must not wait for forks.
            for fd, _ in poll.poll(0 if self._owed else None):
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                else:
                    self._handle(self._receive()[0])
            if self._owed:
                self._owed -= 1
                try:
                    self._make_spare()
                except OSError as exc:
                    # Out of processes, namespaces or descriptors: what runs must not suffer for it.
                    self._send({"no_spare": _fork_failure(exc)})

    def _handle(self, message: dict[str, Any]) -> None:
        if "spares" in message:
            self._owed += message["spares"]
            self._rehearses = message["rehearse"]
        elif "kill" in message:
            child = self._children.get(message["kill"])
            if child is None:
                return
            if self._jailed:
                os.kill(child.pid, signal.SIGKILL)  # pid 1 of its namespace: all goes with it
            else:
                kill_tree(child.pid)
        elif "ping" in message:
            self._send({"pong": message["ping"]})

    def _make_spare(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
            child = self._fork(ours, theirs)
            self._made += 1
            self._children[self._made] = child
            socket.send_fds(self._control, [b'{"spare":%d}' % self._made], [ours.fileno()])

    def _fork(self, ours: socket.socket, theirs: socket.socket) -> _Child:
        network = pid = -1
        try:
            if self._home is not None:
                network = jail.build(self._spec, self._networks)
            pid = self._forks.fork_alone()
            if pid == 0:
                ours.close()  # a spare that held this end too would never see it close
                self._become_instance(theirs)
        except OSError:
            self._networks.leave(network)
            raise
        finally:
            if self._home is not None and pid != 0:
                self._home.come_back()
        return _Child(pid, network)

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
        """End what dead instances left behind: as subreaper, this process inherits it."""
        known = {child.pid for child in self._children.values()}
        for pid in children_of_main_thread():
            if pid not in known:
                kill_tree(pid)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, fds = _receive_fds(self._control)
        if not data:
            raise SystemExit(0)  # the launcher is gone, and with it everything of this template
        message: dict[str, Any] = json.loads(data)
        return message, fds

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    # --- being an instance ------------------------------------------------------------------

    def _become_instance(self, channel: socket.socket) -> NoReturn:
        """Turn this freshly forked process into a spare, then into an instance; never returns."""
        assignment: dict[str, Any] | None = None
        try:
            cover = jail.LateCover() if self._covers_late else None
            self._shut_in()
            assignment, (listener_fd, log_fd) = self._wait_for_assignment(channel)
            self._boot(assignment, listener_fd, log_fd, cover)
        except BaseException as exc:  # noqa: BLE001  # the launcher must hear of every failure
            text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
            if assignment is None:
                print(text, file=sys.stderr, flush=True)  # noqa: T201  # the template's log
            else:
                report = {"boot_failed": assignment["id"], "error": text[-60_000:]}
                with contextlib.suppress(OSError):
                    self._send(report)
            os._exit(_BOOT_FAILED_EXIT)
        os._exit(0)

    def _shut_in(self) -> None:
        """Close what is the template's, enter the jail, give up all rights."""
        linux.set_process_name(SPARE_NAME)
        signal.set_wakeup_fd(-1)
        # Another handler by `signal.signal` would make enums of both: some 80 pages to copy.
        self._on_child_signal = reap_adopted
        os.close(self._wake_read)
        os.close(self._wake_write)
        jail_spaces.close_high()
        if self._jailed:
            jail.enter(self._spec)
        else:
            linux.die_with_parent()
            os.setsid()
            linux.become_subreaper()
            jail.lock(self._spec, jailed=False)
            linux.die_with_parent()  # a change of credentials clears it

    def _wait_for_assignment(self, channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
        """Wait for what this process becomes; end it when nobody will say so any more."""
        with channel:
            poll = select.poll()
            poll.register(channel, select.POLLIN)
            if self._rehearses and not poll.poll(0):
                self._rehearsal.run()
            data, fds = _receive_fds(channel)
        if not data:
            os._exit(0)
        assignment: dict[str, Any] = pydantic_core.from_json(data)
        return assignment, fds

    def _boot(
        self,
        assignment: dict[str, Any],
        listener_fd: int,
        log_fd: int,
        cover: jail.LateCover | None,
    ) -> None:
        linux.set_process_name(INSTANCE_NAME)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        home = WORK
        if not self._jailed:
            home = assignment["work_dir"]
            os.chdir(home)
        # Only what differs: every page that a forked process writes to is copied first.
        for name, value in {"HOME": home, **assignment["env"]}.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.argv[1:] = assignment["arguments"]
        if self._spec.storage:
            storage_lock.hold(f"{STORAGE}/lock", is_shared=self._spec.storage_is_shared)
        dispatcher = self._dispatcher or Dispatcher(load_project(self._project))
        if cover is not None:
            cover.put_on()
        dispatcher.begin()
        listener = socket.socket(fileno=listener_fd)
        self._control.send(pydantic_core.to_json({"booted": assignment["id"]}))
        self._control.close()
        serve(Acceptor(listener).accept, dispatcher)


def _fork_failure(exc: OSError) -> str:
    """Return why a process could not be forked, naming the limit that was reached."""
    return f"{exc} ({process_limits()})" if exc.errno == errno.EAGAIN else str(exc)


def _receive_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet; its descriptors are for this process and not for what tools start."""
    data, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES, 4)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


def _follow(pid: int) -> NoReturn:
    """Wait for the template proper and end as it did."""
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(pid, 0)
            os._exit(max(0, os.waitstatus_to_exitcode(status)) & 0xFF)


def _keep_standard_descriptors() -> None:
    """Open again what the project closed of 0, 1 and 2: no socket may get these numbers."""
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
