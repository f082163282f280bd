"""`SyncEnvironment`, over Ray and over a gateway: the client without `await`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.client import SyncEnvironment
from aenv_ray.errors import ConfigError, InstanceNotFound, ToolNotFound

pytestmark = pytest.mark.usefixtures("cluster", "way")


@pytest.fixture
def sync_env(probe: str) -> Iterator[SyncEnvironment]:
    env = SyncEnvironment(probe, actor="shared")
    yield env
    env.close()


def test_the_sync_client_blocks(sync_env: SyncEnvironment) -> None:
    """The same methods and results without `await`."""
    with sync_env as env:
        assert env.call_tool("add", {"a": 1}).data == 2
        assert any(t["name"].endswith("/add") for t in env.list_tools())
        assert env.call_reward() == {"score": 0.5}
        assert env.exec("echo hi").text() == "hi\n"
        assert env.get_env_info()["status"] == "Running"
        with pytest.raises(ToolNotFound):
            env.call_tool("nonsense")
        first = env.instance_id
    sync_env.release()
    assert sync_env.instance_id is None
    assert sync_env.call_tool("count").data == 1
    assert sync_env.instance_id != first


def test_the_sync_client_attaches(live: Any) -> None:
    """By id, with the same state."""
    handle = live
    ray.get(handle.call_tool.remote("count"))
    env = SyncEnvironment.attach(handle.instance_id)
    assert env.call_tool("count").data == 2
    for _ in range(2):
        env.close()
    with pytest.raises(InstanceNotFound):
        SyncEnvironment.attach(handle.instance_id)
    assert handle.instance_id not in [i.id for i in aenv_ray.list_instances()]


def test_the_sync_client_raises_what_the_constructor_raises(probe: str) -> None:
    """A wrong option is `ConfigError`, in the caller's thread."""
    with pytest.raises(ConfigError, match="actor"):
        SyncEnvironment(probe, actor="lonely")
