"""A launcher as a process of its own: how it detaches, and what it leaves to nobody."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import sys
from pathlib import Path


def become_daemon(directory: Path) -> None:
    """Detach from the starter: a session of its own, no inherited descriptors, normal priority."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(directory / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 65_536)
    os.chdir("/")
    os.umask(0o077)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # a Ray worker runs at nice 15; only root may go back
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def take_lock(directory: Path) -> bool:
    """Become the one launcher of a directory, until this process ends; False when there is one."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    return True


def become_subreaper() -> None:
    """Adopt what dead templates leave, so that it can be ended; Linux only."""
    if sys.platform == "linux":
        # prctl(PR_SET_CHILD_SUBREAPER, 1); importing `runtime.linux` would load pydantic too.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def kill_stragglers(known: set[int] | None = None) -> None:
    """Kill and reap processes of dead templates that this subreaper inherited."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        for pid in map(int, listing.read_text().split()):
            if known is None or pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
