"""Containers by handles, with a real Ray and a real Docker daemon, at both densities."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.config import settings
from aenv_ray.errors import InstanceExpired, InstanceReleased, SandboxLost, SandboxStartFailed
from aenv_ray.models import InstanceStatus
from tests.conftest import require
from tests.contract.docker.docker_node import base_image, docker
from tests.contract.docker.registry import PROGRAM, Registry, log_in, push_new
from tests.ray.cluster import Cluster
from tests.ray.faults import (
    PROBE,
    Driver,
    Witness,
    actor_pid,
    eventually_empty,
    host_of,
    kill,
    processes_of,
    stop,
)

pytestmark = pytest.mark.docker


def containers(cluster: Cluster) -> list[str]:
    """Return the containers of this cluster's instances."""
    form = '{{.Names}} {{.Label "aenv.instance"}} {{.Label "aenv.directory"}}'
    rows = docker("ps", "--all", "--filter", "label=aenv.instance", "--format", form)
    return [row for row in rows.splitlines() if str(cluster.root) in row]


@pytest.fixture
def probe(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The probe project, in the base image; skipped without a daemon before that is made."""
    del request
    target = tmp_path / "probe"
    shutil.copytree(PROBE, target, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((target / "config.json").read_text())
    # Without automatic pools: the tests count containers.
    container = {"image": base_image()}
    config["deployConfig"] |= {"engine": "docker", "container": container, "warm": 0}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture
def make_container(
    probe: Path, cluster: Cluster, nothing_left: None
) -> Iterator[Callable[..., Any]]:
    """Yield a function that creates instances in containers; afterwards nothing may be left."""
    del nothing_left
    made: list[Any] = []

    def create(**options: Any) -> Any:
        made.append(aenv_ray.create(probe, **{"actor": "shared", **options}))
        return made[-1]

    yield create
    ray.get([handle.release.remote() for handle in made], timeout=60)
    eventually_empty(lambda: containers(cluster))


SECOND = """
from aenv_ray.runtime import sidecar
from aenv_ray.runtime import register_tool


@register_tool
def inside(command: str) -> str:
    return sidecar.exec(command).text()
"""


def test_a_sidecar_survives_the_death_of_its_host(
    probe: Path, make_container: Callable[..., Any], cluster: Cluster
) -> None:
    config = json.loads((probe / "config.json").read_text())
    config["deployConfig"] |= {"podTemplate": "DualContainer", "network": "none"}
    (probe / "config.json").write_text(json.dumps(config))
    (probe / "src" / "seconds.py").write_text(SECOND)
    handle = make_container(actor="dedicated", datasource=base_image())

    def inside(command: str) -> str:
        ray.get(handle.info.remote(), timeout=60)  # the host is back
        return str(ray.get(handle.call_tool.remote("inside", {"command": command})).data)

    assert inside("echo kept >/tmp/kept; hostname") != ""
    kill(actor_pid(ray_api.find_actor(ray.get(handle.info.remote()).host)))
    assert inside("cat /tmp/kept") == "kept\n"
    assert "; sidecar: sha256:" in ray.get(handle.info.remote()).start_mode


def test_release_removes_the_container_of_an_instance(
    make_container: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    handle = make_container(actor=density, labels={"run": "seven"})
    assert ray.get(handle.call_tool.remote("add", {"a": 2, "b": 3})).data == 5
    info = ray.get(handle.info.remote())
    assert (info.engine, info.isolation.kind) == ("docker", "container")
    (row,) = containers(cluster)
    name, instance_id, _ = row.split()
    assert instance_id == handle.instance_id
    assert docker("inspect", "--format", '{{index .Config.Labels "aenv.label.run"}}', name) == (
        "seven"
    )
    assert aenv_ray.init().count_processes() == 1  # "nothing is left" counts containers as well
    ray.get(handle.release.remote(), timeout=60)
    assert aenv_ray.init().count_processes() == 0
    ray.get(handle.release.remote(), timeout=60)
    assert containers(cluster) == []
    with pytest.raises(InstanceReleased):
        ray.get(handle.call_tool.remote("count"))


def test_a_call_survives_the_death_of_its_host(
    make_container: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Invariant 1: the container runs on, the call runs once, and the state is unchanged."""
    handle = make_container(actor=density, environment_variables=witness.variables)
    assert ray.get(handle.call_tool.remote("count")).data == 1
    reference = handle.call_tool.remote("hold", {"key": "k"})
    witness.wait_for("began k")
    kill(actor_pid(ray_api.find_actor(ray.get(handle.info.remote()).host)))
    ray.get(handle.write_file.remote("k", ""), timeout=60)
    assert ray.get(reference, timeout=60).data == "held k"
    assert ray.get(handle.call_tool.remote("count")).data == 2
    assert witness.heard() == ["began k", "ended k"]
    info = ray.get(handle.info.remote())
    assert (info.generation, info.status) == (1, InstanceStatus.RUNNING)


async def test_calls_bypass_the_host(make_container: Callable[..., Any], density: str) -> None:
    """A caller on the node is connected to the container: it is answered while the host is not."""
    instance = AsyncEnvHandle(make_container(actor=density))
    assert await instance.connect_directly()
    pid = actor_pid(host_of(instance.handle))
    stop(pid)
    try:
        assert (await instance.call_tool("count", {}, 30.0)).data == 1
    finally:
        kill(pid, signal.SIGCONT)
    await instance.close()


def test_a_node_pulls_with_its_own_login(
    probe: Path, make_container: Callable[..., Any], cluster: Cluster, tmp_path: Path
) -> None:
    """It is read from the Docker configuration on that node when it is needed."""
    require("registry", PROGRAM is not None, "docker-registry is not installed")
    registry = Registry(with_login=True)
    reference = f"{registry.name}/tests/{tmp_path.name.lower()}:1"
    image = push_new(reference, 1024, tmp_path)
    config = json.loads((probe / "config.json").read_text())
    config["deployConfig"]["container"]["image"] = reference
    (probe / "config.json").write_text(json.dumps(config))
    try:
        with pytest.raises(SandboxStartFailed, match="requires a login and this node has none"):
            make_container()
        log_in(settings().docker_config, registry.name)
        env = make_container()
        assert ray.get(env.exec.remote("echo there"), timeout=60).text() == "there\n"
        ray.get(env.release.remote(), timeout=60)
    finally:
        docker("rmi", "--force", image, check=False)
        registry.end()


def test_the_ttl_ends_a_container(make_container: Callable[..., Any], cluster: Cluster) -> None:
    """Invariant 3."""
    handle = make_container(ttl=8.0)  # a busy machine starts a container in seconds
    with pytest.raises(InstanceExpired):
        ray.get(handle.call_tool.remote("hold", {"key": "never"}), timeout=30)
    eventually_empty(lambda: containers(cluster))


def test_the_error_for_a_dead_container_has_its_exit_code(
    make_container: Callable[..., Any], density: str
) -> None:
    """Invariant 2."""
    handle = make_container(actor=density)
    with pytest.raises(SandboxLost, match="exited with code 7"):
        ray.get(handle.call_tool.remote("leave", {"code": 7}), timeout=30)


def test_a_group_of_instances_starts_completely_or_not_at_all(
    probe: Path, cluster: Cluster
) -> None:
    handles = aenv_ray.create_many(probe, 6)
    assert len(containers(cluster)) == 6
    results = ray.get([handle.call_tool.remote("count") for handle in handles], timeout=60)
    assert [result.data for result in results] == [1] * 6
    aenv_ray.release_many(handles)
    assert containers(cluster) == []
    (probe / "src" / "broken.py").write_text("1 / 0\n")
    with pytest.raises(SandboxStartFailed, match="ZeroDivisionError"):
        aenv_ray.create_many(probe, 3)
    eventually_empty(lambda: containers(cluster))


def test_containers_end_with_their_ray_node(
    short_dir: Path, probe: Path, alone: Callable[..., Driver]
) -> None:
    """Invariant 3: SIGKILL of the raylet leaves no container and no janitor."""
    source = (
        f"aenv_ray.create({str(probe)!r}, actor='shared', lifetime='detached')\n"
        "say(len(aenv_ray.list_instances()))"
    )
    other = alone(source)
    assert other.said() == 1

    def rows() -> list[str]:
        form = '{{.Names}} {{.Label "aenv.directory"}}'
        listed = docker("ps", "--all", "--filter", "label=aenv.scope", "--format", form)
        return [row for row in listed.splitlines() if str(short_dir) in row]

    assert len(rows()) == 1
    for pid, command in processes_of(short_dir).items():
        if "/raylet" in command.split()[0]:
            kill(pid)
    eventually_empty(rows)
    eventually_empty(lambda: [c for c in processes_of(short_dir).values() if "docker_janitor" in c])
