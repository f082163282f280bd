"""A template process: an environment's code, loaded once, from which instances are forked.

``python -m aenv_ray.runtime.template FD`` speaks with the node's launcher over the
``SOCK_SEQPACKET`` socket FD, one JSON object a packet:

    launcher → template   {"setup": …}                          once, first
                          {"fork": id, …} + [listener, log]     make an instance
                          {"kill": id}                          end it and all it started
    template → launcher   {"ready": facts …} | {"failed": text} | {"jail_unavailable": why}, once
                          {"exited": id, "status": n}
    instance → launcher   {"booted": id} | {"boot_failed": id, "error": text}

A *bare* template does not load the project; its instances do, after the fork. That serves code
that starts threads or opens connections when it is imported, or reads variables then that differ
between instances.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime import jail, linux
from aenv_ray.runtime.calls import kill_tree
from aenv_ray.runtime.dispatch import Dispatcher
from aenv_ray.runtime.door import serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.loader import load_project
from aenv_ray.runtime.registry import get_registry

PACKET_BYTES: Final = 1 << 20
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE


class TrackingEnviron(os._Environ):  # type: ignore[type-arg]  # generic only in the stubs
    """`os.environ` that remembers which variables the project read while it was imported."""

    reads: set[str] = set()  # noqa: RUF012  # one process, one environment

    def __getitem__(self, key: str) -> str:
        self.reads.add(key)
        return str(super().__getitem__(key))

    def __iter__(self) -> Any:
        self.reads.add("*")
        return super().__iter__()


class Template:
    """The fork server. Single-threaded: a fork copies only the thread that forks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._spec = jail.JailSpec("")
        self._jailed = False
        self._preloaded = False
        self._project = ""
        self._pids: dict[str, int] = {}
        self._home: jail.Home | None = None
        self._networks = jail.Networks()
        self._dispatcher: Dispatcher | None = None
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Set up, report, and fork until the launcher is gone."""
        setup = self._receive()[0]["setup"]
        self._spec = jail.JailSpec(**setup["jail"])
        try:
            self._isolate(setup)
        except jail.JailUnavailable as exc:
            # Half-way in, this process cannot go back: the launcher starts another without a jail.
            self._send({"jail_unavailable": str(exc)})
            return
        facts = jail.facts(self._spec, jailed=self._jailed, reason=setup["reason"])
        report: dict[str, Any] = {"isolation": facts.data(), "pid": os.getpid()}
        self._preloaded = bool(setup["preload"])
        if self._preloaded:
            try:
                report |= self._load()
            except ProjectLoadError as exc:
                self._send({"failed": str(exc)})
                return
            self._dispatcher = Dispatcher(get_registry())
        os.environ.pop("PYTHONPATH", None)  # the runtime's own, not for what tools start
        jail.warm_up()
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
            self._project = jail.PROJECT
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
        jail.settle_template()
        self._home = jail.Home(self._spec)

    def _load(self) -> dict[str, Any]:
        before = _special_fds()
        TrackingEnviron.reads.clear()
        os.environ.__class__ = TrackingEnviron
        try:
            load_project(self._project)
        finally:
            os.environ.__class__ = os._Environ
        reason = ""
        if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
            reason = "its code starts threads when it is imported"
        elif opened := _special_fds() - before:
            reason = f"its code opens {', '.join(sorted(opened))} when it is imported"
        return {"bare_reason": reason, "env_reads": sorted(TrackingEnviron.reads)}

    # --- serving ----------------------------------------------------------------------------

    def _serve(self) -> None:
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                else:
                    message, fds = self._receive()
                    self._handle(message, fds)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if "fork" in message:
            try:
                self._fork(message, fds)
            except OSError as exc:
                self._send({"boot_failed": message["fork"], "error": f"fork: {exc}"})
            finally:
                for fd in fds:
                    os.close(fd)
        elif "kill" in message:
            pid = self._pids.get(message["kill"])
            if pid is None:
                return
            if self._jailed:
                os.kill(pid, signal.SIGKILL)  # pid 1 of its namespace: all in it goes with it
            else:
                kill_tree(pid)

    def _fork(self, message: dict[str, Any], fds: list[int]) -> None:
        pid = -1
        try:
            if self._home is not None:
                jail.build(self._spec, message["fork"], self._networks)
            pid = os.fork()
            if pid == 0:
                self._become_instance(message, fds)
        finally:
            if self._home is not None and pid != 0:
                self._home.come_back()
        self._pids[message["fork"]] = pid

    def _reap(self) -> None:
        by_pid = {pid: instance for instance, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            instance = by_pid.get(pid)
            if instance is not None:
                del self._pids[instance]
                self._networks.leave(instance)
                self._send({"exited": instance, "status": os.waitstatus_to_exitcode(status)})
        if not self._jailed:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """End what dead instances left behind: as subreaper, this process inherits it."""
        known = set(self._pids.values())
        for pid in _children_of_main_thread():
            if pid not in known:
                kill_tree(pid)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        data, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 4)
        if not data:
            raise SystemExit(0)  # the launcher is gone, and with it everything of this template
        message: dict[str, Any] = json.loads(data)
        return message, fds

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    # --- being an instance ------------------------------------------------------------------

    def _become_instance(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        """Turn this freshly forked process into an instance; never returns."""
        try:
            self._boot(message, fds)
        except BaseException as exc:  # noqa: BLE001  # the launcher must hear of every failure
            text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
            with contextlib.suppress(OSError):
                error = text[-60_000:]
                self._send({"boot_failed": message["fork"], "error": error})
            os._exit(_BOOT_FAILED_EXIT)
        os._exit(0)

    def _boot(self, message: dict[str, Any], fds: list[int]) -> None:
        instance_id: str = message["fork"]
        listener_fd, log_fd = fds
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._redirect(log_fd)
        if self._jailed:
            assert self._home is not None
            self._home.close()
            self._networks.forget()
            jail.enter(self._spec)
            home = jail.WORK
        else:
            linux.die_with_parent()
            os.setsid()
            linux.become_subreaper()
            home = message["work_dir"]
            jail.lock(self._spec)
            linux.die_with_parent()  # a change of credentials clears it
        os.chdir(home)
        # Only what differs: every page that a forked process writes to is copied first.
        for name, value in {"HOME": home, **message["env"]}.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        sys.argv[1:] = message["arguments"]
        dispatcher = self._dispatcher or Dispatcher(load_project(self._project))
        dispatcher.begin()
        signal.signal(signal.SIGCHLD, _reap_adopted)
        listener = socket.socket(fileno=listener_fd)
        self._send({"booted": instance_id})
        self._control.close()
        serve(listener, dispatcher)

    @staticmethod
    def _redirect(log_fd: int) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(null)
        os.close(log_fd)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams


def _follow(pid: int) -> NoReturn:
    """Wait for the template proper and end as it did."""
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(pid, 0)
            os._exit(max(0, os.waitstatus_to_exitcode(status)) & 0xFF)


def _special_fds() -> set[str]:
    """Return the open sockets and pipes, by what they point to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "pipe:")):
                found.add(target.partition(":")[0])
    return found


def _children_of_main_thread() -> Iterable[int]:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        return [int(pid) for pid in listing.read_text().split()]
    return []


def _reap_adopted(*_: object) -> None:
    """Reap orphans that this process adopted, and no child that a tool itself waits for.

    The kernel hands orphans to the main thread, which starts no processes of its own; children
    that tools start belong to the threads that started them.
    """
    for pid in _children_of_main_thread():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Run a template on the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv.pop(1)))  # not an argument of the project's code
    Template(control).run()


if __name__ == "__main__":
    main()
