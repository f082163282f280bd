"""Runs the bundled Redis of a data directory for as long as a hub uses it, and not longer.

``python -m aenv_ray.hub.redis_keeper`` with a `KeeperSpec` as JSON on standard input. It is no
child of a Ray worker, so neither the hub's death nor the end of its process group reaches it. Hubs
hold a shared lock on ``users.lock``, which the kernel takes back when they die in whatever way;
once nobody has held it for `linger_s`, Redis ends in order and so does this process. Redis dies
with this process, and this process with Redis: a hub that wants both starts both.

Imports the standard library alone: it lives beside every hub.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, TypedDict

POLL_S: Final = 0.25
LOCK_PATIENCE_S: Final = 1.0
STOP_S: Final = 10.0
"""Redis writes what it has within this time, or is killed; what it acknowledged is on disk."""
KEEPER_LOCK: Final = "keeper.lock"
USERS_LOCK: Final = "users.lock"
LOG: Final = "redis.log"


class KeeperSpec(TypedDict):
    """What a keeper is told."""

    program: str
    """Path of a redis-server or valkey-server."""
    directory: str
    """Where data, log and locks are."""
    socket: str
    """Path of the Unix socket."""
    password: str
    linger_s: float
    """How long Redis waits for a restarted hub."""


def redis_config(spec: KeeperSpec) -> str:
    """Return the configuration. Redis reads it from its standard input: no process list shows it.

    ``appendfsync always``: an answer is sent after what it acknowledges is on disk (invariant 5).
    """
    quoted = {
        "unixsocket": spec["socket"],
        "dir": spec["directory"],
        "logfile": str(Path(spec["directory"], LOG)),
        "requirepass": spec["password"],
    }
    plain = {
        "port": "0",
        "unixsocketperm": "700",
        "daemonize": "no",
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "always",
        "no-appendfsync-on-rewrite": "no",
        "maxmemory-policy": "noeviction",
        "lua-time-limit": "5000",
    }
    lines = [f"{key} {value}" for key, value in plain.items()]
    lines += [f"{key} {json.dumps(value)}" for key, value in quoted.items()]
    return "\n".join(lines) + "\n"


def lock(path: Path, operation: int, patience_s: float = 0.0) -> int | None:
    """Return a descriptor that holds a lock on a file; None when somebody else's is in the way."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.01)
                continue
            os.close(descriptor)
            return None
        return descriptor


class Keeper:
    """One Redis and who uses it."""

    def __init__(self, spec: KeeperSpec) -> None:
        self._spec = spec
        self._users = Path(spec["directory"], USERS_LOCK)
        self._unused_since: float | None = None
        self._is_hurried = False

    def run(self) -> None:
        """Run Redis until it ends or nobody uses it any more."""
        signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        Path(self._spec["socket"]).unlink(missing_ok=True)  # of one that was killed
        redis = self._start(signals)
        while redis.poll() is None:
            unused = lock(self._users, fcntl.LOCK_EX)
            if unused is not None and self._is_enough():
                # The lock is kept until this process is gone: who wants Redis now starts another.
                self._stop(redis)
                return
            if unused is None:
                self._unused_since = None
            else:
                os.close(unused)
            received = signal.sigtimedwait(signals, POLL_S)
            self._is_hurried |= received is not None and received.si_signo != signal.SIGCHLD

    def _is_enough(self) -> bool:
        now = time.monotonic()
        if self._unused_since is None:
            self._unused_since = now
        return self._is_hurried or now - self._unused_since >= self._spec["linger_s"]

    def _start(self, blocked: set[signal.Signals]) -> subprocess.Popen[bytes]:
        keeper = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != keeper:
                os._exit(1)  # killed before it was asked for: nobody would end this Redis

        # Whole before there is a reader: should this process be killed now, Redis does not start
        # with its defaults, which are a port, no password and nothing on disk.
        config, writer = os.pipe()
        try:
            with open(writer, "wb") as file:
                file.write(redis_config(self._spec).encode())
            return subprocess.Popen(
                [self._spec["program"], "-"],
                stdin=config,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._spec["directory"],
                preexec_fn=prepare,  # noqa: PLW1509  # one thread: nothing can be half done
            )
        finally:
            os.close(config)

    @staticmethod
    def _stop(redis: subprocess.Popen[bytes]) -> None:
        redis.terminate()
        try:
            redis.wait(STOP_S)
        except subprocess.TimeoutExpired:
            redis.kill()
            redis.wait()


def detach() -> None:
    """Become nobody's child, in a session of its own, at normal priority; locks are kept."""
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    os.umask(0o077)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # a Ray worker runs at nice 15; only root may go back


def main() -> None:
    """Run as a program."""
    spec: Any = json.load(sys.stdin)
    # Taken before the starter may go on: it then knows that this keeper, or another one, is there.
    # The patience is for those who only look whether it is taken.
    held = lock(Path(spec["directory"], KEEPER_LOCK), fcntl.LOCK_EX, LOCK_PATIENCE_S)
    if held is None:
        return  # another one was first
    detach()
    os.ftruncate(held, 0)
    os.write(held, str(os.getpid()).encode())
    Keeper(spec).run()


if __name__ == "__main__":
    main()
