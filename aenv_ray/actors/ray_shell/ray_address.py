"""Addresses and directories of Ray: waiting for a listener, and short paths for sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from typing import Final

from aenv_ray.errors import FabricUnavailable

_PATIENCE_S: Final = 30.0
"""How long to wait for a head that is just starting."""
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.25
_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux."""
_SOCKET: Final = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.12"
"""Longest path that Ray appends to the temporary directory."""
_LEAST_BYTES: Final = 16 << 20
"""Free space that a local Ray needs to start."""


def short_directory() -> str | None:
    """Return a directory for Ray's session if ``TMPDIR`` is too long for its sockets.

    None: Ray's default is short enough, or ``RAY_TMPDIR`` is set.
    """
    if "RAY_TMPDIR" in os.environ:
        return None
    longest = os.fsencode(tempfile.gettempdir() + _SOCKET)
    return "/tmp/ray" if len(longest) > _SOCKET_PATH_BYTES else None


def start_hint() -> str:
    """Return the hint for a local Ray that does not start."""
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    directory = short_directory() or f"{directory}/ray"
    try:
        free_bytes = shutil.disk_usage(os.path.dirname(directory)).free
    except OSError:
        free_bytes = _LEAST_BYTES
    if free_bytes < _LEAST_BYTES:
        return (
            f"{os.path.dirname(directory)} has only {free_bytes >> 10} KiB left: free some space, "
            "or set RAY_TMPDIR to another directory"
        )
    return f"the machine may be short of memory, CPU or disk; see {directory}/session_latest/logs"


def await_listener(address: str, patience_s: float = _PATIENCE_S) -> None:
    """Wait until something listens at ``host:port``; other forms of address return at once.

    Without this check a driver of Ray retries for minutes.

    Raises:
        FabricUnavailable: Nothing listened within `patience_s`.
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
                f"no Ray listened at {address} within {patience_s:.0f} s: {exc}",
                hint="check RAY_ADDRESS, or unset it to start a local Ray",
            ) from exc
        return
