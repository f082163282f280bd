"""Process 1 of the container of one instance.

The engine mounts the project at `PROJECT`, the runtime below `HOME`, and a read-only directory for
this instance at `RUN`, in which it listens on the Unix socket `BOOT`. Over it this process receives
the listener of the door, whose path is outside the container. It loads the project and writes one
JSON line to `BOOT`: ``{"ready": facts}`` or ``{"failed": text}``. Then it serves the fast door. Its
arguments are those of the project.

In a pod, process 1 is `aenv_ray.runtime.container.pod`. It starts this process, and hands over the
authenticated connections of the host through an inherited socket. A container with its own kernel
has no shared mount for sockets: see `aenv_ray.runtime.container.authenticated_door`.

In an image with its own server (`aenv_ray.runtime.container.relay`) this process starts the server
and ends with it. In an image without a suitable Python it serves commands and files only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.container import seccomp
from aenv_ray.runtime.container.authenticated_door import read_order
from aenv_ray.runtime.container.connection_handover import HandoverListener
from aenv_ray.runtime.door.calls import retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.system import carried_python, child_tracking, linux, storage_lock
from aenv_ray.runtime.system.reaper import LISTS_CHILDREN, Acceptor, reap_adopted
from aenv_ray.runtime.system.signals import ignore_signals_from_inside

HOME: Final = "/.aenv"
"""Directory of ``runtime``, ``lib`` and ``run``."""
RUN: Final = f"{HOME}/run"
BOOT: Final = "boot"
STORAGE_LOCK: Final = f"{HOME}/storage.lock"
"""Exists if the instance uses its storage exclusively; otherwise `SHARED_STORAGE_LOCK` does."""
SHARED_STORAGE_LOCK: Final = f"{HOME}/storage.shared"
PROJECT: Final = "/project"
MAX_FILES: Final = 4096
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE
_TEXT_LIMIT: Final = 60_000


class HostDoor(Protocol):
    """How the host connects."""

    def prepare(self) -> None:
        """Get ready for connections, before the host is told to connect."""

    def tell(self, report: dict[str, Any]) -> None:
        """Report to the host whether the start succeeded."""

    def accept(self) -> socket.socket:
        """Return the next connection of the host.

        Raises:
            OSError: It cannot be accepted now, or the listener is closed.
        """


def main(
    serving: str = "runtime",
    absence: str = "",
    directory: str = "",
    server: Sequence[str] = (),
    link: int = -1,
    *,
    keyed: bool = False,
) -> None:
    """Start what is to be served, report it, and serve until the container ends.

    Args:
        serving: ``runtime``: the project's code; ``public``: the image's own server; ``commands``:
            only commands and files.
        absence: With ``commands``, why there are no tools.
        directory: Working directory of `server`; with ``commands``, of commands ("": ``HOME``).
        server: With ``public``, the command that starts the image's server.
        link: In a pod, descriptor of the socket to process 1; it replaces ``boot`` too.
        keyed: Whether the host authenticates with a key, which is on standard input.
    """
    carried_python.leave_variables_of_image()
    host: HostDoor = read_order() if keyed else _MountedDoor() if link < 0 else _HandoverDoor(link)
    try:
        _prepare_process(directory if serving == "commands" else "")
        if not keyed:  # another kernel shares no sockets with this node
            seccomp.restrict()
        for lock in (STORAGE_LOCK, SHARED_STORAGE_LOCK):
            if os.path.exists(lock):
                storage_lock.lock_storage(lock, is_shared=lock == SHARED_STORAGE_LOCK)
        if serving == "public":
            from aenv_ray.runtime.container import relay

            registry = relay.serve(server, directory)
        else:
            registry = load_project(PROJECT) if serving == "runtime" else Registry(absence=absence)
        if os.getpid() == 1:
            ignore_signals_from_inside()
        dispatcher = Dispatcher(registry)
        retry_lost_interrupts()
        host.prepare()  # before `begin`, which notes the descriptors that a reset expects
        # In an image with its own server, all processes are that server's.
        dispatcher.begin(owns_sandbox=serving != "public", owns_namespace=link >= 0)
    except BaseException as exc:  # noqa: BLE001  # the engine gets every failure
        text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
        host.tell({"failed": text[-_TEXT_LIMIT:]})
        with contextlib.suppress(OSError):  # a host that does not get the report reads the log
            os.write(2, f"{text[-_TEXT_LIMIT:]}\n".encode(errors="replace"))
        os._exit(_BOOT_FAILED_EXIT)
    gc.collect()
    gc.freeze()
    host.tell({"ready": {"uid": os.getuid()}})
    serve(host.accept, dispatcher)


class _MountedDoor:
    """A listener that the host hands over: no other process in the container can have it."""

    def __init__(self) -> None:
        self._boot = socket.socket(socket.AF_UNIX)
        self._boot.connect(f"{RUN}/{BOOT}")
        self._acceptor: Acceptor | None = None

    def prepare(self) -> None:
        _, fds, _, _ = socket.recv_fds(self._boot, 1, 1)
        listener = socket.socket(fileno=fds[0])
        listener.set_inheritable(False)
        self._acceptor = Acceptor(listener)

    def tell(self, report: dict[str, Any]) -> None:
        with self._boot:
            _say(self._boot, report)

    def accept(self) -> socket.socket:
        assert self._acceptor is not None  # set by `prepare`
        return self._acceptor.accept()


class _HandoverDoor:
    """Connections that process 1 of a pod has authenticated, received over an inherited socket."""

    def __init__(self, link: int) -> None:
        self._link = socket.socket(fileno=link)
        self._link.set_inheritable(False)
        linux.become_subreaper()  # process 1 need not ask for it
        self._acceptor: Acceptor | None = None

    def prepare(self) -> None:
        self._acceptor = Acceptor(HandoverListener(self._link))

    def tell(self, report: dict[str, Any]) -> None:
        _say(self._link, report)

    def accept(self) -> socket.socket:
        assert self._acceptor is not None  # set by `prepare`
        return self._acceptor.accept()


def _prepare_process(directory: str) -> None:
    """Reap orphans as process 1 must, set limits, and protect this process from its children."""
    signal.signal(signal.SIGCHLD, reap_adopted)
    if not LISTS_CHILDREN:
        child_tracking.track_children()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # text streams
    sys.argv[0] = PROJECT
    os.chdir(directory or os.environ["HOME"])
    if not directory and not os.access(".", os.W_OK):
        owner = Path().stat()
        raise PermissionError(
            f"user {os.getuid()} cannot write to {Path.cwd()}: in this image it belongs to user "
            f"{owner.st_uid} (mode {owner.st_mode & 0o777:o})"
        )
    os.umask(0o022)
    for kind, value in ((resource.RLIMIT_NOFILE, MAX_FILES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    # Children cannot trace this process or read its memory, which contains the graders.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.set_process_name("aenv-instance")


def _say(boot: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the engine is gone
        boot.sendall(json.dumps(message).encode() + b"\n")
