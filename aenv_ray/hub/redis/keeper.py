"""A daemon that runs the bundled Redis of a data directory while a hub uses it.

Started as ``python -m aenv_ray.hub.redis.keeper`` with a `KeeperSpec` as JSON on standard input. It
is not a child of a Ray worker, so it survives the hub and its process group. Each hub holds a
shared lock on ``users.lock``, which the kernel releases when the hub dies. Once nobody has held the
lock for `linger_s`, or at once if the last user asks for it, the keeper shuts Redis down and exits.
If either of the two dies, so does the other, and a hub that still needs Redis starts both again.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, TypedDict

from aenv_ray.daemon import detach
from aenv_ray.files import FileLock

POLL_S: Final = 0.25
LOCK_PATIENCE_S: Final = 1.0
HURRY_S: Final = 2.0
"""A user that leaves asks to stop at once. This long later the request is void: it had not been the
last user, and a hub that is restarted must find Redis."""
STOP_S: Final = 10.0
"""Redis is killed if its shutdown takes longer; acknowledged writes are on disk by then."""
KEEPER_LOCK: Final = "keeper.lock"
USERS_LOCK: Final = "users.lock"
LOG: Final = "redis.log"


class KeeperSpec(TypedDict):
    """What a keeper needs to know."""

    program: str
    """Path of redis-server or valkey-server."""
    directory: str
    """Directory of the data, the log and the locks."""
    socket: str
    """Path of the Unix socket."""
    password: str
    linger_s: float
    """How long Redis runs on without a hub, so that a restarted hub finds it."""


def redis_config(spec: KeeperSpec) -> str:
    """Return the configuration, which Redis reads from standard input: no process list shows it.

    ``appendfsync always``: Redis answers a write only after it is on disk (invariant 5).
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


class Use:
    """Decides how long Redis runs on without users; times are of a monotonic clock.

    Args:
        linger_s: As in `KeeperSpec`.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._unused_since: float | None = None
        self._hurried_at = -math.inf

    def hurry(self, now: float) -> None:
        """Note that a user asked to stop at once, if it was the last one."""
        self._hurried_at = now

    def is_over(self, now: float, *, is_used: bool) -> bool:
        """Return whether it is time to stop."""
        if is_used:
            self._unused_since = None
            return False
        if self._unused_since is None:
            self._unused_since = now
        is_hurried = now - self._hurried_at < HURRY_S
        return is_hurried or now - self._unused_since >= self._linger_s


class Keeper:
    """Runs one Redis while its data directory has users."""

    def __init__(self, spec: KeeperSpec) -> None:
        self._spec = spec
        self._users = Path(spec["directory"], USERS_LOCK)
        self._use = Use(spec["linger_s"])

    def run(self) -> None:
        """Run Redis until it exits or nobody uses it."""
        signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        Path(self._spec["socket"]).unlink(missing_ok=True)  # left by a Redis that was killed
        redis = self._start(signals)
        while redis.poll() is None:
            unused = FileLock.try_acquire(self._users)
            if self._use.is_over(time.monotonic(), is_used=unused is None):
                # The lock is held until this process exits: a hub that comes now starts another.
                self._stop(redis)
                return
            if unused is not None:
                unused.close()
            received = signal.sigtimedwait(signals, POLL_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._use.hurry(time.monotonic())

    def _start(self, blocked: set[signal.Signals]) -> subprocess.Popen[bytes]:
        keeper = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() != keeper:
                os._exit(1)  # the keeper was killed in between: nothing would end this Redis

        # The configuration is complete before Redis can read it. If this process is killed now,
        # Redis does not start with its defaults: a TCP port, no password, nothing on disk.
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
                preexec_fn=prepare,  # noqa: PLW1509  # this process has one thread
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


def main() -> None:
    """Run as a program."""
    spec: Any = json.load(sys.stdin)
    try:
        # Taken before this process detaches: the starter then knows that a keeper is running. The
        # patience is for processes that only look whether the lock is held.
        held = FileLock.acquire(Path(spec["directory"], KEEPER_LOCK), LOCK_PATIENCE_S)
    except TimeoutError:
        return  # another keeper was first
    detach(keep=[held.fileno()])
    os.ftruncate(held.fileno(), 0)
    os.write(held.fileno(), str(os.getpid()).encode())
    Keeper(spec).run()


if __name__ == "__main__":
    main()
