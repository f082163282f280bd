"""What instances print, through handles, `Environment` and the command, on a real Ray."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray

from aenv_ray.client import Environment
from aenv_ray.client.sync import SyncEnvironment
from aenv_ray.errors import ConfigError, InstanceReleased
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually


def say(handle: Any, text: str) -> None:
    """Have a program print a line to the instance's own output."""
    ray.get(handle.call_tool.remote("say", {"text": text}), timeout=60)


def log_of(handle: Any, **options: Any) -> str:
    return "".join(ray.get(list(handle.logs.remote(**options)), timeout=60))


def test_a_log_is_returned_whole_or_from_its_end(make: Callable[..., Any], density: str) -> None:
    handle = make(actor=density)
    for text in ("one", "zwölf", "three"):
        say(handle, text)
    eventually(lambda: "three\n" in log_of(handle))
    assert log_of(handle) == "one\nzwölf\nthree\n"
    assert log_of(handle, tail=2) == "zwölf\nthree\n"
    for wrong in (-1, "3", True):
        with pytest.raises(ConfigError, match="tail"):
            handle.logs.remote(tail=wrong)


def test_a_log_that_is_followed_ends_with_its_instance(make: Callable[..., Any]) -> None:
    handle = make()
    say(handle, "before")
    heard: list[str] = []

    def listen() -> None:
        heard.extend(ray.get(piece, timeout=60) for piece in handle.logs.remote(follow=True))

    listener = threading.Thread(target=listen)
    listener.start()
    eventually(lambda: "before" in "".join(heard))
    say(handle, "after")
    eventually(lambda: "after" in "".join(heard))
    ray.get(handle.release.remote(), timeout=60)
    listener.join(60)
    assert not listener.is_alive()
    assert "".join(heard) == "before\nafter\n"
    with pytest.raises(InstanceReleased):
        log_of(handle)


async def test_an_environment_returns_its_log_and_a_reader_may_stop_early(cluster: Cluster) -> None:
    del cluster
    async with Environment(str(PROBE), actor="shared") as env:
        await env.call_tool("say", {"text": "hello"})

        async def first() -> str:
            async for piece in env.logs(follow=True):
                return piece
            return ""

        assert await asyncio.wait_for(first(), 60) == "hello\n"
        assert [piece async for piece in env.logs(tail=0)] == []
        assert (await env.call_tool("count")).data == 1


def test_a_blocking_environment_returns_its_log(cluster: Cluster) -> None:
    del cluster
    with SyncEnvironment(str(PROBE), actor="shared") as env:
        env.call_tool("say", {"text": "hello"})
        assert next(iter(env.logs(follow=True))) == "hello\n"
    env.close()


def test_the_command_prints_the_log_of_an_instance_of_a_running_ray(
    make: Callable[..., Any], cluster: Cluster
) -> None:
    handle = make()
    for text in ("one", "two"):
        say(handle, text)
    eventually(lambda: "two\n" in log_of(handle))

    def aenv(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aenv_ray.cli.main", "instance", *words],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            capture_output=True, text=True, check=False, timeout=90,
        )  # fmt: skip

    done = aenv("logs", handle.instance_id, "--tail", "1")
    assert (done.returncode, done.stdout) == (0, "two\n"), done.stderr
    told = json.loads(aenv("logs", handle.instance_id, "-o", "json").stdout)
    assert told["id"] == handle.instance_id
    assert told["text"].endswith("two\n")
    assert aenv("logs", handle.instance_id, "-o", "json", "--follow").returncode == 2
    unknown = aenv("logs", "probe-00000000")
    assert unknown.returncode == 1
    assert "there is no instance probe-00000000" in unknown.stderr
