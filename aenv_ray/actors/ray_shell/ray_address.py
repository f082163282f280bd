"""Where a Ray is: whether one listens at an address, and where a local one keeps its sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from typing import Final

from aenv_ray.errors import FabricUnavailable

_PATIENCE_S: Final = 30.0
"""How long a head may take to listen: a driver often starts beside it."""
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.25
_SOCKET_PATH_BYTES: Final = 107
"""What Linux allows the path of a Unix socket."""
_SOCKET: Final = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.12"
"""The longest that Ray puts below the directory for temporary files."""
_LEAST_BYTES: Final = 16 << 20
"""What a local Ray writes there in its first minutes, and some more."""


def short_directory() -> str | None:
    """Return a directory for Ray's session where that of ``TMPDIR`` is too long for its sockets.

    None: Ray's own choice will do, or ``RAY_TMPDIR`` names one.
    """
    if "RAY_TMPDIR" in os.environ:
        return None
    longest = os.fsencode(tempfile.gettempdir() + _SOCKET)
    return "/tmp/ray" if len(longest) > _SOCKET_PATH_BYTES else None


def way_out() -> str:
    """Return the hint for a local Ray that does not start."""
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    directory = short_directory() or f"{directory}/ray"
    try:
        free_bytes = shutil.disk_usage(os.path.dirname(directory)).free
    except OSError:
        free_bytes = _LEAST_BYTES
    if free_bytes < _LEAST_BYTES:
        return (
            f"{os.path.dirname(directory)} has {free_bytes >> 10} KiB of room left: make more, or "
            "name another directory in RAY_TMPDIR"
        )
    return (
        "the machine may be short of memory, cores or disk; its words are in "
        f"{directory}/session_latest/logs"
    )


def await_listener(address: str, patience_s: float = _PATIENCE_S) -> None:
    """Return when something listens at ``host:port``; at once for every other form of address.

    Ray's own driver asks for minutes, in lines of its log.

    Raises:
        FabricUnavailable: Nothing did for `patience_s`.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "/" in host or not (host and port.isdecimal() and int(port) < 1 << 16):
        return
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except OSError as exc:
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                continue
            raise FabricUnavailable(
                f"no Ray listens at {address}, asked for {patience_s:.0f} s: {exc}",
                hint="check RAY_ADDRESS, or unset it to start a local Ray",
            ) from exc
        return
