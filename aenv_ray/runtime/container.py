"""Process 1 of a container that holds one instance.

The engine mounts the project at `PROJECT`, the runtime below `HOME` and a directory of this
instance's own at `RUN`, where it listens on the Unix socket ``boot``. This process loads the
project, makes the Unix socket ``door``, and says one JSON line on ``boot``: ``{"ready": facts}`` or
``{"failed": text}``. From then on it serves the fast door. The arguments are the project's own.

In a pod, process 1 is `aenv_ray.runtime.pod`, which starts this process and hands over to it, by a
socket that it inherits, the connections that have shown that they are the host's.

In an image that has its own server (`aenv_ray.runtime.relay`) this process starts that and ends
with it; in one without a fitting Python it serves commands and files, and no code is loaded.
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
from typing import Any, Final

from aenv_ray.runtime import linux, storage_lock
from aenv_ray.runtime.dispatch import Dispatcher
from aenv_ray.runtime.door import serve
from aenv_ray.runtime.faults import ProjectLoadError
from aenv_ray.runtime.handed_over import HandedOver
from aenv_ray.runtime.loader import load_project
from aenv_ray.runtime.orphans import Acceptor, reap_adopted
from aenv_ray.runtime.registry import Registry

HOME: Final = "/.aenv"
"""Below it are ``runtime``, ``lib`` and ``run``."""
RUN: Final = f"{HOME}/run"
STORAGE_LOCK: Final = f"{HOME}/storage.lock"
"""There where the instance is alone in having its storage."""
PROJECT: Final = "/project"
MAX_FILES: Final = 4096
_TERMINATED: Final = 128 + signal.SIGTERM
_BOOT_FAILED_EXIT: Final = 70  # EX_SOFTWARE
_BACKLOG: Final = 16
_TEXT_LIMIT: Final = 60_000


def main(
    serving: str = "runtime",
    absence: str = "",
    directory: str = "",
    server: Sequence[str] = (),
    link: int = -1,
) -> None:
    """Load what is to be served, say so, and serve until the container ends.

    Args:
        serving: ``runtime``: the project's code; ``public``: the image's own server; ``commands``:
            commands and files alone.
        absence: With ``commands``, why there are no tools.
        directory: Where `server` runs; with ``commands``, where commands do, "" for ``HOME``.
        server: With ``public``, the command of the image's server.
        link: In a pod, descriptor of the socket to process 1; it takes the place of ``boot`` too.
    """
    boot = socket.socket(socket.AF_UNIX) if link < 0 else socket.socket(fileno=link)
    if link < 0:
        boot.connect(f"{RUN}/boot")
    else:
        boot.set_inheritable(False)
        linux.become_subreaper()  # as process 1 is without being told
    try:
        if link < 0 and not _is_from_outside(boot):
            raise ProjectLoadError(
                "this OCI runtime does not tell who connects to a socket, so that tools could call "
                "rewards; runc and crun do"
            )
        _shut_in(directory if serving == "commands" else "")
        if os.path.exists(STORAGE_LOCK):
            storage_lock.hold(STORAGE_LOCK)
        if serving == "public":
            from aenv_ray.runtime import relay

            registry = relay.serve(server, directory)
        else:
            registry = load_project(PROJECT) if serving == "runtime" else Registry(absence=absence)
        dispatcher = Dispatcher(registry)
        dispatcher.begin()
        listener = _listen(f"{RUN}/door") if link < 0 else HandedOver(boot)
    except BaseException as exc:  # noqa: BLE001  # the engine must hear of every failure
        text = str(exc) if isinstance(exc, ProjectLoadError) else traceback.format_exc()
        _say(boot, {"failed": text[-_TEXT_LIMIT:]})
        os._exit(_BOOT_FAILED_EXIT)
    gc.collect()
    gc.freeze()
    _say(boot, {"ready": {"uid": os.getuid()}})
    acceptor = Acceptor(listener)
    if link >= 0:
        serve(acceptor.accept, dispatcher)
        return
    boot.close()

    def accept_from_outside() -> socket.socket:
        while not _is_from_outside(sock := acceptor.accept()):
            sock.close()
        return sock

    serve(accept_from_outside, dispatcher)


def _shut_in(directory: str) -> None:
    """Become what process 1 must be, and keep what it started out of this process."""
    # Process 1 ignores every signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(_TERMINATED))
    signal.signal(signal.SIGCHLD, reap_adopted)
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
