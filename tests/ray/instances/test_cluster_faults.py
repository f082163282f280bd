"""The controller or a driver dies: the fabric continues, and ends what the driver owned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import InstanceExpired
from aenv_ray.hub.store import FileInstanceStore
from tests.ray.cluster import Cluster
from tests.ray.faults import (
    PROBE,
    Driver,
    actor_pid,
    eventually,
    eventually_empty,
    kill,
    stop,
    without,
)

# --- the controller ------------------------------------------------------------------------------


def test_the_fabric_survives_the_death_of_its_controller(
    told: Callable[..., Any], density: str
) -> None:
    """Calls continue meanwhile; create, get, list and release work afterwards."""
    handle = told(actor=density)
    kill(actor_pid(ray_api.find_actor(ray_api.CONTROLLER_NAME)))
    assert ray.get(handle.call_tool.remote("count")).data == 1
    another = told(actor=density)
    found = aenv_ray.get(handle.instance_id)
    assert ray.get([h.call_tool.remote("count") for h in (found, another)])[0].data == 2
    listed = {i.id for i in aenv_ray.list_instances()}
    assert {handle.instance_id, another.instance_id} <= listed
    kill(actor_pid(ray_api.find_actor(ray_api.CONTROLLER_NAME)))
    ray.get([h.release.remote() for h in (handle, another)], timeout=60)
    assert not {handle.instance_id, another.instance_id} & {i.id for i in aenv_ray.list_instances()}


def test_a_restarted_controller_ends_ended_jobs_though_nobody_calls(
    driver: Callable[..., Driver], cluster: Cluster
) -> None:
    """A job that ended while the controller was away takes its instances with it."""
    before = cluster.sandboxes()
    other = driver(
        f"made = aenv_ray.create({str(PROBE)!r}, actor='shared')\n"
        "say(ray.get_runtime_context().get_job_id())"
    )
    job = other.said()
    cluster.appeared(before)
    controller = actor_pid(ray_api.find_actor(ray_api.CONTROLLER_NAME))
    stop(controller)
    try:
        other.kill()
        eventually(lambda: job in ray_api.dead_jobs(), 30.0)
    finally:
        kill(controller)
    eventually_empty(lambda: without(cluster.sandboxes(), before))


@contextlib.contextmanager
def listing() -> Iterator[None]:
    """List instances again and again, so that a listing is under way whenever something dies."""
    done, begun = threading.Event(), threading.Barrier(5, timeout=60)

    def list_on() -> None:
        begun.wait()
        while not done.is_set():
            aenv_ray.list_instances()

    threads = [threading.Thread(target=list_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    aenv_ray.list_instances()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def test_a_host_killed_for_good_before_its_record_was_written_leaves_nothing(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """Invariant 3: the store says which engine the host was about to use.

    Also when somebody lists all that while, and meets a host that is named and dead.
    """
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    store = FileInstanceStore(cluster.node_dir / "records")
    store.delete([handle.instance_id])
    assert handle.instance_id in store.engines_used()
    with listing():
        ray.kill(handle._host, no_restart=True)
        eventually_empty(lambda: without(cluster.sandboxes(), before))
    eventually(lambda: handle.instance_id not in store.engines_used())


def test_a_host_killed_while_the_controller_is_away_leaves_nothing(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """Invariant 3: a restarted controller looks for orphans of its absence."""
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    controller = actor_pid(ray_api.find_actor(ray_api.CONTROLLER_NAME))
    stop(controller)
    try:
        ray.kill(handle._host, no_restart=True)
        eventually(lambda: handle.instance_id not in ray_api.actor_names())
    finally:
        kill(controller)
    eventually_empty(lambda: without(cluster.sandboxes(), before))


# --- the driver and the cluster ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_instances_end_with_the_job_that_owns_them(
    driver: Callable[..., Driver], cluster: Cluster, how: str
) -> None:
    """A job's instances go within 10 s of it; detached ones stay, attach and release."""
    before = cluster.sandboxes()
    other = driver(
        f"path = {str(PROBE)!r}\n"
        "job = [aenv_ray.create(path, actor=a) for a in ('shared', 'dedicated')]\n"
        "kept = [aenv_ray.create(path, actor=a, lifetime='detached')\n"
        "        for a in ('shared', 'dedicated')]\n"
        "ray.get([h.call_tool.remote('count') for h in job + kept])\n"
        "say([[h.instance_id for h in hs] for hs in (job, kept)])"
    )
    job, kept = other.said()
    handles = [aenv_ray.get(i) for i in job]
    cluster.appeared(before, 4)
    if how == "killed":
        other.kill()
    else:
        other.finish()
    cluster.appeared(before, 2)
    for handle in handles:
        with pytest.raises(InstanceExpired, match="job"):
            ray.get(handle.call_tool.remote("count"))
    attached = [aenv_ray.get(i) for i in kept]
    assert [ray.get(h.call_tool.remote("count")).data for h in attached] == [2, 2]
    ray.get([h.release.remote() for h in attached])
    assert without(cluster.sandboxes(), before) == []
