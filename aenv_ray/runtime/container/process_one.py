"""Process 1 of a container that holds one instance.

The engine mounts the project at `PROJECT`, the runtime below `HOME` and a directory of this
instance's own at `RUN`, where it listens on the Unix socket ``boot``. This process loads the
project, makes the Unix socket ``door``, and says one JSON line on ``boot``: ``{"ready": facts}`` or
``{"failed": text}``. From then on it serves the fast door. The arguments are the project's own.

In a pod, process 1 is `aenv_ray.runtime.container.pod`, which starts this process and hands over to
it, by a socket that it inherits, the connections that have shown that they are the host's. In a
container with a kernel of its own no socket is in a mount: see
`aenv_ray.runtime.container.keyed_door`.

In an image that has its own server (`aenv_ray.runtime.container.relay`) this process starts that
and ends with it; in one without a fitting Python it serves commands and files, and no code is
loaded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.container.connection_handover import HandedOver
from aenv_ray.runtime.container.keyed_door import read_order
from aenv_ray.runtime.door.calls import retry_lost_interrupts
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.system import child_tracking, linux, storage_lock
from aenv_ray.runtime.system.reaper import LISTS_CHILDREN, Acceptor, reap_adopted

HOME: Final = "/.aenv"
"""Below it are ``runtime``, ``lib`` and ``run``."""
RUN: Final = f"{HOME}/run"
STORAGE_LOCK: Final = f"{HOME}/storage.lock"
"""There where the instance is alone in having its storage; where it shares that, the next."""
SHARED_STORAGE_LOCK: Final = f"{HOME}/storage.shared"
PROJECT: Final = "/project"
MAX_FILES: Final = 4096
_TERMINATED: Final = 128 + signal.SIGTERM
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE
_BACKLOG: Final = 16
_TEXT_LIMIT: Final = 60_000


class Entrance(Protocol):
    """How the host gets in."""

    def prepare(self) -> None:
        """Be ready to be connected to, before the host is told so."""

    def tell(self, report: dict[str, Any]) -> None:
        """Tell the host what became of the start."""

    def accept(self) -> socket.socket:
        """Return the next connection of the host.

        Raises:
            OSError: There is none now, or never again.
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
    """Load what is to be served, say so, and serve until the container ends.

    Args:
        serving: ``runtime``: the project's code; ``public``: the image's own server; ``commands``:
            commands and files alone.
        absence: With ``commands``, why there are no tools.
        directory: Where `server` runs; with ``commands``, where commands do, "" for ``HOME``.
        server: With ``public``, the command of the image's server.
        link: In a pod, descriptor of the socket to process 1; it takes the place of ``boot`` too.
        keyed: The host comes in by a key, which is on standard input.
    """
    entrance: Entrance = read_order() if keyed else _Mounted() if link < 0 else _Handed(link)
    try:
        if isinstance(entrance, _Mounted):
            entrance.check()
        _shut_in(directory if serving == "commands" else "")
        for lock in (STORAGE_LOCK, SHARED_STORAGE_LOCK):
            if os.path.exists(lock):
                storage_lock.hold(lock, is_shared=lock == SHARED_STORAGE_LOCK)
        if serving == "public":
            from aenv_ray.runtime.container import relay

            registry = relay.serve(server, directory)
        else:
            registry = load_project(PROJECT) if serving == "runtime" else Registry(absence=absence)
        dispatcher = Dispatcher(registry)
        dispatcher.begin()
        retry_lost_interrupts()
        entrance.prepare()
    except BaseException as exc:  # noqa: BLE001  # the engine must hear of every failure
        text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
        entrance.tell({"failed": text[-_TEXT_LIMIT:]})
        os._exit(_BOOT_FAILED_EXIT)
    gc.collect()
    gc.freeze()
    entrance.tell({"ready": {"uid": os.getuid()}})
    serve(entrance.accept, dispatcher)


class _Mounted:
    """Sockets in a directory that host and container share; peers are told by their credentials."""

    def __init__(self) -> None:
        self._boot = socket.socket(socket.AF_UNIX)
        self._boot.connect(f"{RUN}/boot")
        self._acceptor: Acceptor | None = None

    def check(self) -> None:
        """Refuse a kernel that does not tell who connects.

        Raises:
            ProjectLoadError: Everybody inside could pass for the host.
        """
        if not _is_from_outside(self._boot):
            raise ProjectLoadError(
                "this OCI runtime does not tell who connects to a socket, so that tools could call "
                "rewards: it passes for runc or crun by the name of its program, and is neither"
            )

    def prepare(self) -> None:
        self._acceptor = Acceptor(_listen(f"{RUN}/door"))

    def tell(self, report: dict[str, Any]) -> None:
        with self._boot:
            _say(self._boot, report)

    def accept(self) -> socket.socket:
        assert self._acceptor is not None  # prepared
        while not _is_from_outside(sock := self._acceptor.accept()):
            sock.close()
        return sock


class _Handed:
    """Connections that process 1 of a pod has let in, over one inherited socket."""

    def __init__(self, link: int) -> None:
        self._link = socket.socket(fileno=link)
        self._link.set_inheritable(False)
        linux.become_subreaper()  # as process 1 is without being told
        self._acceptor: Acceptor | None = None

    def prepare(self) -> None:
        self._acceptor = Acceptor(HandedOver(self._link))

    def tell(self, report: dict[str, Any]) -> None:
        _say(self._link, report)

    def accept(self) -> socket.socket:
        assert self._acceptor is not None  # prepared
        return self._acceptor.accept()


def _shut_in(directory: str) -> None:
    """Become what process 1 must be, and keep what it started out of this process."""
    # Process 1 ignores every signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_TERMINATED))
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
            f"the image has {Path.cwd()} already, for user {owner.st_uid} (mode "
            f"{owner.st_mode & 0o777:o}), and user {os.getuid()} cannot write to it"
        )
    os.umask(0o022)
    for kind, value in ((resource.RLIMIT_NOFILE, MAX_FILES), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    # What tools start cannot trace this process or read its memory, where the graders are.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.set_process_name("aenv-instance")


def _listen(path: str) -> socket.socket:
    """Return a listening socket that the engine, which may be another user, can connect to."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _is_from_outside(sock: socket.socket) -> bool:
    """Whether the peer is outside of this container: it has no pid here then (invariant 8)."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0]) == 0


def _say(boot: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # an engine that is gone finds out by itself
        boot.sendall(json.dumps(message).encode() + b"\n")
