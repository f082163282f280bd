"""Warm pools through `aenv_ray.warm`, on a real Ray: what is taken, and what ends them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import ConfigError, InstanceReleased, SandboxStartFailed
from aenv_ray.ids import InstanceId
from aenv_ray.models import ActorDensity
from tests.contract.docker.docker_node import base_image
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, actor_pid, eventually, eventually_empty, kill, without
from tests.ray.instances.test_docker import containers


@pytest.fixture
def warm(cluster: Cluster, nothing_left: None) -> Iterator[Callable[..., int]]:
    """Ask for pools of the probe project; drained after the test, and then nothing is left."""
    del cluster, nothing_left
    asked: list[tuple[Any, dict[str, Any]]] = []

    def ask(count: int, environment: str | Path = PROBE, **options: Any) -> int:
        waits = {"wait": bool(count), **options}
        asked.append((environment, {k: v for k, v in options.items() if k != "wait"}))
        return aenv_ray.warm(environment, count, **waits)

    yield ask
    for environment, options in asked:
        assert aenv_ray.warm(environment, 0, **options) == 0


def is_warm(handle: Any) -> bool:
    """Whether an instance came from a pool."""
    return str(ray.get(handle.info.remote()).start_mode).startswith("warm, ")


@pytest.mark.parametrize("engine", ["process", "fake"])
def test_a_group_comes_from_the_pool(
    warm: Callable[..., int], cluster: Cluster, engine: str
) -> None:
    assert warm(6, engine=engine) == 6
    before = cluster.sandboxes()
    handles = aenv_ray.create_many(PROBE, 6, engine=engine, ttl="5m", owner="me")
    assert [is_warm(handle) for handle in handles] == [True] * 6
    if engine == "process":
        for pid in before:
            assert pid in cluster.sandboxes(), "those that were ready are those that were taken"
    results = ray.get([handle.call_tool.remote("count") for handle in handles], timeout=60)
    assert [result.data for result in results] == [1] * 6, "never called before"
    info = ray.get(handles[0].info.remote())
    assert (info.owner, info.density) == ("me", ActorDensity.SHARED)
    assert info.deadline == info.created_at + 300.0
    mine = {handle.instance_id for handle in handles}
    assert mine <= {one.id for one in aenv_ray.list_instances()}
    assert aenv_ray.get(handles[0].instance_id).reference == handles[0].reference
    aenv_ray.release_many(handles)
    with pytest.raises(InstanceReleased):
        ray.get(handles[0].call_tool.remote("count"))


def test_a_sandbox_from_a_pool_has_the_ttl_of_its_create(
    warm: Callable[..., int], make: Callable[..., Any]
) -> None:
    """Invariant 3: the pool's own deadline is hours away."""
    warm(1)
    handle = make(ttl="1s")
    assert is_warm(handle)
    eventually(lambda: ray.get(handle.info.remote()).status.value != "Running")


def test_only_creates_with_the_same_options_use_a_pool(
    warm: Callable[..., int], make: Callable[..., Any]
) -> None:
    """Variables and arguments of a running process cannot be changed: the pool is not used."""
    names = {"names": ["COLOUR"]}
    warm(1, environment_variables={"COLOUR": "red"}, arguments=["-v"])
    assert not is_warm(make())
    assert not is_warm(make(environment_variables={"COLOUR": "blue"}, arguments=["-v"]))
    handle = make(environment_variables={"COLOUR": "red"}, arguments=["-v"])
    assert is_warm(handle)
    seen = ray.get(handle.call_tool.remote("surroundings", names)).data
    assert (seen["variables"], seen["arguments"]) == ({"COLOUR": "red"}, ["-v"])


def test_a_dedicated_instance_uses_no_pool(
    warm: Callable[..., int], make: Callable[..., Any]
) -> None:
    """A pool belongs to a shared host, and a dedicated instance has its own host."""
    warm(1)
    assert not is_warm(make(actor="dedicated"))
    assert is_warm(make())


def test_the_client_takes_from_the_pool(warm: Callable[..., int]) -> None:
    warm(1)
    with aenv_ray.SyncEnvironment(str(PROBE), actor="shared") as env:
        assert env.get_env_info()["start_mode"].startswith("warm, ")


def test_a_killed_sandbox_is_never_handed_out(
    warm: Callable[..., int], make: Callable[..., Any], cluster: Cluster
) -> None:
    before = cluster.sandboxes()
    warm(3)
    signal_all(cluster.appeared(before, 3))
    handles = [make() for _ in range(3)]
    assert [ray.get(handle.call_tool.remote("count")).data for handle in handles] == [1] * 3


def test_a_pool_survives_the_death_of_its_host(
    warm: Callable[..., int], make: Callable[..., Any], cluster: Cluster
) -> None:
    """Its sandboxes are adopted into the pool, and it is filled again."""
    before = cluster.sandboxes()
    warm(3)
    ready = cluster.appeared(before, 3)
    host = ray.get(make(arguments=["finds the host"]).info.remote()).host
    kill(actor_pid(ray_api.find_actor(host)))
    handles = [make() for _ in range(3)]
    assert [is_warm(handle) for handle in handles] == [True] * 3
    assert without(ready, cluster.sandboxes()) == []
    assert [ray.get(handle.call_tool.remote("count")).data for handle in handles] == [1] * 3
    assert warm(3) == 3


def test_a_pool_ends_with_the_job_that_asked_for_it(
    cluster: Cluster, nothing_left: None, driver: Callable[..., Any]
) -> None:
    """Invariant 3: a driver that was killed leaves no sandboxes that wait for it."""
    del nothing_left
    before = cluster.sandboxes()
    other = driver(f"say(aenv_ray.warm({str(PROBE)!r}, 3, wait=True))")
    assert other.said() == 3
    cluster.appeared(before, 3)
    other.kill()
    eventually_empty(lambda: without(cluster.sandboxes(), before), 30.0)


def test_a_detached_pool_outlives_its_job(
    warm: Callable[..., int],
    make: Callable[..., Any],
    cluster: Cluster,
    driver: Callable[..., Any],
) -> None:
    before = cluster.sandboxes()
    mortal = driver(
        f"aenv_ray.warm({str(PROBE)!r}, 2, wait=True, lifetime='detached')\n"
        f"say(aenv_ray.warm({str(PROBE)!r}, 2, wait=True))"
    )
    assert mortal.said() == 4
    mortal.kill()
    eventually(lambda: len(without(cluster.sandboxes(), before)) == 2, 30.0)
    assert is_warm(make())
    assert warm(1, lifetime="detached") == 1


def test_waiting_for_the_pool_of_a_project_that_does_not_load_raises(
    warm: Callable[..., int], project: Callable[..., Path]
) -> None:
    with pytest.raises(SandboxStartFailed, match="ZeroDivisionError"):
        warm(1, project("1 / 0\n"))


def test_an_invalid_pool_size_is_refused(cluster: Cluster) -> None:
    del cluster
    with pytest.raises(ConfigError, match="-1"):
        aenv_ray.warm(PROBE, -1)


def test_the_config_asks_for_a_pool(
    cluster: Cluster, nothing_left: None, project: Callable[..., Path]
) -> None:
    del nothing_left
    before = cluster.sandboxes()
    deploy = {"network": "none", "warm": 2}
    root = project(
        "from aenv_ray.runtime import register_tool\n@register_tool\ndef one() -> int: return 1\n",
        config=json.dumps({"name": "written", "deployConfig": deploy}),
    )
    handles = [aenv_ray.create(root, actor="shared")]
    assert not is_warm(handles[0])
    eventually(lambda: len(without(cluster.sandboxes(), before)) == 3)

    def takes_one() -> bool:  # it may have been forked, and not yet be on the shelf
        handles.append(aenv_ray.create(root, actor="shared"))
        return is_warm(handles[-1])

    eventually(takes_one)
    assert ray.get(handles[-1].call_tool.remote("one")).data == 1
    aenv_ray.release_many(handles)
    assert aenv_ray.warm(root, 0) == 0


@pytest.mark.docker
def test_containers_come_from_a_pool_that_outlives_its_host(
    warm: Callable[..., int], make: Callable[..., Any], cluster: Cluster, tmp_path: Path
) -> None:
    """A sandbox that was killed meanwhile is not handed out, either."""
    root = tmp_path / "probe"
    shutil.copytree(PROBE, root, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((root / "config.json").read_text())
    config["deployConfig"] |= {"engine": "docker", "container": {"image": base_image()}}
    (root / "config.json").write_text(json.dumps(config))
    assert warm(2, root) == 2
    ready = {InstanceId(row.split()[1]) for row in containers(cluster)}
    handles = aenv_ray.create_many(root, 2, ttl="5m")
    assert {handle.instance_id for handle in handles} == ready
    assert [ray.get(handle.call_tool.remote("count")).data for handle in handles] == [1] * 2
    aenv_ray.release_many(handles)
    assert warm(2, root) == 2
    host = ray.get(make(arguments=["finds the host"]).info.remote()).host
    ready = {InstanceId(row.split()[1]) for row in containers(cluster)}
    kill(actor_pid(ray_api.find_actor(host)))
    handle = make(root)
    assert is_warm(handle)
    assert handle.instance_id in ready
    ray.get(handle.release.remote(), timeout=60)
    assert warm(0, root) == 0
    assert containers(cluster) == []
