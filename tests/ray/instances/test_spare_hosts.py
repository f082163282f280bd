"""Spare hosts: a dedicated create takes a ready one, whichever process was killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import InstanceNotFound
from aenv_ray.ids import environment_part
from aenv_ray.models import InstanceInfo, InstanceStatus
from aenv_ray.policy import Policy
from aenv_ray.project import project
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, Driver, actor_pid, eventually, host_of, kill

START_S = 60.0


@pytest.fixture
def own(make: Callable[..., Any]) -> Callable[[], Any]:
    """Create instances of the probe, each with its own actor."""
    return lambda: make(actor="dedicated")


def spares() -> list[str]:
    """Return the names of the dedicated hosts of the probe that never had an instance."""
    names = [name for name in ray_api.actor_names() if environment_part(name) == "probe"]
    hosts = {name: ray_api.find_actor(name) for name in names}
    asked = {name: host.load.remote() for name, host in hosts.items() if host is not None}
    found = []
    for name, load in asked.items():
        try:
            taken, _ = ray.get(load)
            ray.get(hosts[name].info.remote(name))
        except InstanceNotFound:
            found += [name] if not taken else []
        except (aenv_ray.errors.AenvError, ray.exceptions.RayActorError):
            continue  # it is ending
    return found


def spare() -> str:
    """Wait until the probe has its one spare, and return its name."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = spares()
        return len(found) == 1

    eventually(is_there, START_S, what=lambda: f"not one spare but {found}")
    return found[0]


def controller() -> Any:
    return ray_api.find_actor(ray_api.CONTROLLER_NAME)


def count(handle: Any) -> int:
    return int(ray.get(handle.call_tool.remote("count"), timeout=60).data)


def test_a_create_takes_the_spare_and_another_gets_ready(own: Callable[[], Any]) -> None:
    """The instance has the name of its actor, as `ray list actors` shows it."""
    first = own()
    name = spare()
    assert name != first.instance_id
    second = own()
    assert second.instance_id == name
    info = ray.get(second.info.remote())
    assert (info.id, info.host) == (name, name)
    assert count(second) == 1
    assert count(aenv_ray.get(name)) == 2
    assert spare() not in {first.instance_id, second.instance_id}


def test_an_instance_on_a_spare_survives_its_host_and_is_released(own: Callable[[], Any]) -> None:
    own()
    name = spare()
    handle = own()
    assert handle.instance_id == name
    assert count(handle) == 1
    kill(actor_pid(host_of(handle)))
    assert count(handle) == 2
    ray.get(handle.release.remote(), timeout=60)
    assert name not in {info.id for info in aenv_ray.list_instances()}


def test_a_killed_spare_does_no_harm(own: Callable[[], Any]) -> None:
    """A spare killed with SIGKILL is restarted by Ray; one that is gone is not handed out."""
    own()
    kill(actor_pid(ray_api.find_actor(spare())))
    assert count(own()) == 1
    name = spare()
    ray_api.kill(ray_api.find_actor(name))
    handle = own()
    assert handle.instance_id != name
    assert count(handle) == 1


def test_a_create_that_is_repeated_after_the_death_of_the_controller_makes_one_instance(
    own: Callable[[], Any],
) -> None:
    """Ray repeats it with the same ids: the claimed spare is found again, unclaimed ones end."""
    own()
    name = spare()
    source, options = project.resolve(PROBE), CreateOptions()
    specs = options.specs(source, 1, job_id=ray_api.job_id(), policy=Policy())
    ((_, info),) = ray.get(controller().create_dedicated.remote(specs, 0.0), timeout=60)
    assert isinstance(info, InstanceInfo)
    assert (info.id, info.requested_id) == (name, specs[0].instance_id)
    unclaimed = spare()
    kill(actor_pid(controller()))
    ((_, again),) = ray.get(controller().create_dedicated.remote(specs, 0.0), timeout=60)
    assert again.id == name
    assert [i.id for i in aenv_ray.list_instances()].count(name) == 1
    eventually(lambda: unclaimed not in ray_api.actor_names(), START_S)
    ray.get(controller().release.remote([specs[0].instance_id]), timeout=60)
    assert name not in {i.id for i in aenv_ray.list_instances()}


def test_a_spare_outlives_the_job_that_caused_it(
    own: Callable[[], Any], driver: Callable[..., Driver], cluster: Cluster
) -> None:
    """A job that ends takes its instances with it, and not the host of another's instance."""
    other = driver(f"made = aenv_ray.create({str(PROBE)!r})\nsay(made.instance_id)")
    theirs = other.said()
    name = spare()
    handle = own()
    assert handle.instance_id == name
    other.kill()
    eventually(lambda: theirs not in {i.id for i in aenv_ray.list_instances()}, START_S)
    assert count(handle) == 1
    assert ray.get(handle.info.remote()).status is InstanceStatus.RUNNING


def test_two_drivers_never_get_the_same_spare(
    own: Callable[[], Any], driver: Callable[..., Driver]
) -> None:
    own()
    other = driver(
        f"made = [aenv_ray.create({str(PROBE)!r}) for _ in range(4)]\n"
        "say([ray.get(m.call_tool.remote('count')).data for m in made])"
    )
    mine = [own() for _ in range(4)]
    assert [count(handle) for handle in mine] == [1, 1, 1, 1]
    assert other.said() == [1, 1, 1, 1]


def test_a_group_takes_the_spare_and_new_hosts(own: Callable[[], Any]) -> None:
    own()
    name = spare()
    group = aenv_ray.create_many(PROBE, 2, actor="dedicated")
    assert [count(handle) for handle in group] == [1, 1]
    assert [handle.instance_id for handle in group].count(name) == 1
    aenv_ray.release_many(group)
