"""How a local Ray starts and how a running one is reached: addresses, directories, processes."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from aenv_ray.errors import FabricUnavailable
from aenv_ray.runtime.door.calls import kill_tree

T = TypeVar("T")

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
_ADDRESS_BYTES: Final = 300
_RAYS: Final = os.fsencode(Path("ray", "core", "src", "ray"))
"""Part of the command of Ray's own programs."""

_tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
_start_lock = threading.Lock()
_thread: threading.Thread | None = None


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


def of_ray_start() -> str | None:
    """Return the address of the Ray that this user's ``ray start`` left running, else None.

    Ray itself trusts the file with the address, even if another user wrote it or now listens there.
    But the Ray of another user could run code in this process.
    """
    import psutil
    from ray._private.utils import get_ray_address_file  # type: ignore[attr-defined]  # re-exported

    try:
        # Others may write to the directory: a link or a pipe there is not followed or waited for.
        file = os.open(get_ray_address_file(None), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(file, encoding="utf-8") as opened:
            address = opened.read(_ADDRESS_BYTES).strip()
    except (OSError, ValueError):
        return None
    processes: Any = psutil.process_iter
    for process in processes():
        with contextlib.suppress(psutil.Error):
            command, owner = process.cmdline(), process.uids().real
            is_raylet = bool(command) and os.path.basename(command[0]).startswith("raylet")
            if is_raylet and f"--gcs-address={address}" in command and owner in (0, os.getuid()):
                return address
    return None


def children() -> frozenset[int]:
    """Return the pids of this process's children; on systems other than Linux none."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return frozenset(found)


def end_since(before: frozenset[int]) -> None:
    """Kill what Ray started: its programs among the children that are not in `before`.

    After a failed start Ray itself ends them only when the driver exits, some a minute later.
    """
    for pid in children() - before:
        with contextlib.suppress(OSError):
            if _RAYS in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill_tree(pid)


def run_on_main_thread(work: Callable[[], T]) -> T:
    """Run `work` on the main thread if this is it, else on a thread that never ends; wait for it.

    Ray's processes die with the *thread* that started them (``PR_SET_PDEATHSIG``), so a Ray started
    on a pool thread would die with that thread.

    Raises:
        BaseException: What `work` raises.
    """
    if threading.current_thread() is threading.main_thread():
        return work()
    global _thread
    with _start_lock:
        if _thread is None or not _thread.is_alive():  # a fork does not inherit threads
            # A daemon thread: any other would be joined at exit, before Ray is shut down.
            _thread = threading.Thread(target=_run_tasks, name="aenv-ray-start", daemon=True)
            _thread.start()
    done: Future[T] = Future()
    _tasks.put((work, done))
    return done.result()


def _run_tasks() -> None:
    while True:
        work, done = _tasks.get()
        try:
            done.set_result(work())
        except BaseException as exc:  # noqa: BLE001  # raised on the caller's thread
            done.set_exception(exc)
        del work, done
