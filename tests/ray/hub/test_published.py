"""Published versions make instances by name, wherever a project's path does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import CatalogConflict, ConfigError, EnvironmentNotFound
from aenv_ray.hub import hub_actor
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion
from aenv_ray.project import project
from tests.ray.cluster import Cluster

pytestmark = pytest.mark.redis

SOURCE = """
from aenv_ray.runtime import register_tool

@register_tool
def which() -> str:
    return "{version}"
"""


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Iterator[HubClient]:
    del cluster
    aenv_ray.init()
    yield hub_actor.ensure_hub()
    hub_actor.end_hub()
    shutil.rmtree(settings().data_dir / "hub")


async def _publish(hub: HubClient, source: project.Project) -> EnvironmentVersion:
    store = open_artifact_store(settings())
    data = source.archive()
    try:
        digest = await store.put(data)
    finally:
        store.close()
    return await hub.push(
        EnvironmentVersion(
            name=source.config.name,
            version=source.config.version,
            digest=source.digest,
            archive=digest,
            archive_bytes=len(data),
            config={},
        )
    )


@pytest.fixture
def publish(hub: HubClient, tmp_path: Path) -> Callable[..., EnvironmentVersion]:
    """Publish an environment that returns its version, and remove its source."""

    def publish(version: str, name: str = "published") -> EnvironmentVersion:
        directory = tmp_path / name
        (directory / "src").mkdir(parents=True)
        config = (
            f'{{"name": "{name}", "version": "{version}", "deployConfig": {{"network": "none"}}}}'
        )
        (directory / "config.json").write_text(config)
        (directory / "src" / "tools.py").write_text(SOURCE.format(version=version))
        entry = blocking(_publish(hub, project.load(directory)))
        shutil.rmtree(directory)
        return entry

    return publish


def told(handle: Any) -> str:
    return str(ray.get(handle.call_tool.remote("which", {})).text())


def test_a_version_and_the_highest_one_make_instances(
    publish: Callable[..., EnvironmentVersion], hub: HubClient, make: Callable[..., Any]
) -> None:
    publish("1.9.0")
    entry = publish("1.10.0")
    assert told(make("published@1.9.0")) == "1.9.0"
    assert told(make("published")) == "1.10.0"
    shutil.rmtree(settings().data_dir / "artifacts")  # it is on this node by now
    again = make("published@1.10.0")
    assert told(again) == "1.10.0"
    assert ray.get(again.info.remote()).reference == "published@1.10.0"
    blocking(hub.set_status("published", "1.10.0", EnvironmentStatus.FAILED))
    with pytest.raises(CatalogConflict, match="Failed"):
        make("published@1.10.0")
    assert told(make("published")) == "1.9.0"
    (settings().data_dir / "projects" / entry.digest / "src" / "more.py").write_text("")
    blocking(hub.set_status("published", "1.10.0", EnvironmentStatus.READY))
    with pytest.raises(ConfigError, match="edited") as caught:
        make("published")
    shutil.rmtree(settings().data_dir / "projects" / entry.digest)
    assert entry.digest in str(caught.value.hint)


def test_the_error_for_an_unpublished_version_says_where_to_look(
    publish: Callable[..., EnvironmentVersion], hub: HubClient
) -> None:
    publish("1.0.0", "other")
    with pytest.raises(EnvironmentNotFound) as caught:
        aenv_ray.create("other@2.0.0")
    assert "1.0.0" in str(caught.value.hint)
    with pytest.raises(EnvironmentNotFound) as caught:
        aenv_ray.create("nothing-like-it")
    assert "mini-terminal" in str(caught.value.hint)
    assert "aenv list" in str(caught.value.hint)
    with pytest.raises(EnvironmentNotFound) as caught:
        aenv_ray.create("./nothing-like-it")
    blocking(hub.push(EnvironmentVersion(
        name="bare", version="1", digest="", archive="", archive_bytes=0, config={},
    )))  # fmt: skip
    with pytest.raises(ConfigError, match="without its source"):
        aenv_ray.create("bare")


async def test_groups_pools_and_environments_take_names_too(
    publish: Callable[..., EnvironmentVersion],
) -> None:
    publish("3.0.0", "grouped")
    handles = aenv_ray.create_many("grouped", 2)
    assert {told(handle) for handle in handles} == {"3.0.0"}
    aenv_ray.release_many(handles)
    assert aenv_ray.warm("grouped", 1, wait=True) == 1
    aenv_ray.warm("grouped", 0)
    async with aenv_ray.Environment("grouped@3.0.0") as env:
        assert (await env.call_tool("which", {})).content[0]["text"] == "3.0.0"
