"""The controller, the driver or Ray dies: the fabric goes on, or ends and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors import ray_api
from aenv_ray.actors.controller import CONTROLLER_NAME
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
    processes_of,
    stop,
    without,
)

# --- the controller ------------------------------------------------------------------------------


def test_the_fabric_survives_the_death_of_its_controller(
    told: Callable[..., Any], density: str
) -> None:
    """Calls go on meanwhile; create, get, list and release work after."""
    handle = told(actor=density)
    kill(actor_pid(ray_api.find_actor(CONTROLLER_NAME)))
    assert ray.get(handle.call_tool.remote("count")).data == 1
    another = told(actor=density)
    found = aenv_ray.get(handle.instance_id)
    assert ray.get([h.call_tool.remote("count") for h in (found, another)])[0].data == 2
    listed = {i.id for i in aenv_ray.list_instances()}
    assert {handle.instance_id, another.instance_id} <= listed
    kill(actor_pid(ray_api.find_actor(CONTROLLER_NAME)))
    ray.get([h.release.remote() for h in (handle, another)], timeout=60)
    assert not {handle.instance_id, another.instance_id} & {i.id for i in aenv_ray.list_instances()}


def test_a_restarted_controller_ends_ended_jobs_though_nobody_calls(
    driver: Callable[..., Driver], cluster: Cluster
) -> None:
    """Design D8: a job that ended while the controller was away takes its instances with it."""
    before = cluster.sandboxes()
    other = driver(
        f"made = aenv_ray.create({str(PROBE)!r}, actor='shared')\n"
        "say(ray.get_runtime_context().get_job_id())"
    )
    job = other.said()
    cluster.appeared(before)
    controller = actor_pid(ray_api.find_actor(CONTROLLER_NAME))
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
    """Invariant 3: a controller that is back looks for what was left meanwhile."""
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    controller = actor_pid(ray_api.find_actor(CONTROLLER_NAME))
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
    """Design D8: a job's instances go within 10 s of it; detached ones stay, attach and release."""
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


LOCAL_CLUSTER = (
    "aenv_ray.init()\n"
    "path = {path!r}\n"
    "made = [aenv_ray.create(path, actor=a) for a in ('shared', 'dedicated')]\n"
    "made += [aenv_ray.create(path, actor='shared', lifetime='detached')]\n"
    "ray.get([h.exec.remote('setsid sleep 1234 >/dev/null 2>&1 &') for h in made])\n"
    "ray.get(made[0].call_tool.remote('count'))\n"
)
HELD = "held = made[1].call_tool.remote('hold', {'key': 'never'})\n"


def ours(root: Path) -> list[str]:
    """Return the launchers, templates and sandboxes of a cluster, with what they started."""
    marks = ("aenv_ray.engines", "aenv_ray.runtime", "sleep")
    return [c for c in processes_of(root).values() if any(mark in c for mark in marks)]


def test_a_killed_driver_takes_its_local_ray_with_it(
    driver: Callable[..., Driver], short_dir: Path
) -> None:
    """A driver that started Ray itself, and SIGKILL: no host, launcher or sandbox stays."""
    alone = driver(LOCAL_CLUSTER.format(path=str(PROBE)) + "say(1)", alone=short_dir)
    alone.said()
    assert len(ours(short_dir)) > 5
    alone.kill()
    eventually_empty(lambda: ours(short_dir))


def test_a_local_ray_ends_with_its_driver(driver: Callable[..., Driver], short_dir: Path) -> None:
    """A program that just ends leaves nothing, though it released nothing."""
    alone = driver(LOCAL_CLUSTER.format(path=str(PROBE)) + "say(1)", alone=short_dir)
    alone.said()
    alone.finish()
    eventually_empty(lambda: processes_of(short_dir))


@pytest.mark.namespaces
@pytest.mark.timeout(300)  # Ray gives its processes 16 s to end
def test_ray_stop_in_the_middle_leaves_nothing(
    driver: Callable[..., Driver], short_dir: Path
) -> None:
    """In namespaces of its own, for it ends every Ray that it sees; a call is under way."""
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    apart = ["unshare", *rights, "--pid", "--mount-proc", "--fork", "--kill-child"]
    source = LOCAL_CLUSTER.format(path=str(PROBE)) + HELD
    alone = driver(source + "say(1)", alone=short_dir, inside=apart)
    alone.said()
    assert len(ours(short_dir)) > 5
    pid = alone.process.pid
    (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    enter = ["nsenter", f"--target={first}", "--pid", "--mount", *(["--user"] if rights else [])]
    stopped = subprocess.run(
        [*enter, sys.executable, "-m", "ray.scripts.scripts", "stop"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    eventually_empty(lambda: ours(short_dir))
    alone.kill()
    eventually_empty(lambda: processes_of(short_dir))
