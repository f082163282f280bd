"""Whatever is killed: no call runs twice, each gets a result or a typed error, nothing stays.

Each test kills something for real. The witness, a socket of the test, hears what tools really did.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors import ray_api
from aenv_ray.actors.controller import CONTROLLER_NAME
from aenv_ray.client import Environment
from aenv_ray.engines.launcher_files import short_name
from aenv_ray.engines.launcher_logs import LOG_LIMIT_BYTES
from aenv_ray.errors import (
    CallOutcomeUnknown,
    InstanceExpired,
    InstanceNotFound,
    SandboxLost,
    ToolTimeout,
)
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.models import InstanceStatus
from tests.ray.conftest import Cluster
from tests.ray.faults import (
    GONE_S,
    PROBE,
    Driver,
    Witness,
    actor_pid,
    eventually,
    eventually_empty,
    kill,
    launcher_pids,
    processes_of,
    without,
)


@pytest.fixture
def told(make: Callable[..., Any], witness: Witness) -> Callable[..., Any]:
    """Create instances that speak to the witness."""
    return lambda **options: make(environment_variables=witness.variables, **options)


def host_of(handle: Any) -> Any:
    """Return the actor that hosts an instance."""
    return ray_api.find_actor(ray.get(handle.info.remote()).host)


# --- the sandbox ---------------------------------------------------------------------------------


def test_a_killed_sandbox_is_lost_and_no_result(
    told: Callable[..., Any], cluster: Cluster, witness: Witness, density: str
) -> None:
    """Invariant 2: calls under way and later ones are `SandboxLost`, and ran once."""
    neighbour = told(actor="shared")
    ray.get(neighbour.call_tool.remote("count"))
    before = cluster.sandboxes()
    handle = told(actor=density)
    (pid,) = cluster.appeared(before)
    references = [handle.call_tool.remote(t, {"key": t}) for t in ("hold", "ahold")]
    for tool in ("hold", "ahold"):
        witness.wait_for(f"began {tool}")
    kill(pid)
    for reference in references:
        with pytest.raises(SandboxLost, match="SIGKILL") as caught:
            ray.get(reference, timeout=GONE_S)
        assert caught.value.instance_id == handle.instance_id
    with pytest.raises(SandboxLost, match="SIGKILL"):
        ray.get(handle.call_tool.remote("count"))
    assert ray.get(handle.info.remote()).status is InstanceStatus.FAILED
    assert sorted(witness.heard()) == ["began ahold", "began hold"]
    assert ray.get(neighbour.call_tool.remote("count")).data == 2


def test_a_tool_that_ends_the_process_is_a_lost_sandbox(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """`os._exit` in a tool: `SandboxLost` with the exit code, never a result, and it ran once."""
    handle = told(actor=density)
    with pytest.raises(SandboxLost, match="exited with code 7"):
        ray.get(handle.call_tool.remote("leave", {"code": 7}), timeout=GONE_S)
    assert witness.heard() == ["leaving 7"]


def test_a_stopped_sandbox_leaves_outcomes_unknown(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """A sandbox that does not answer: `CallOutcomeUnknown`, never a guess; release ends it."""
    before = cluster.sandboxes()
    handle = told(actor=density)
    kill(cluster.appeared(before)[0], signal.SIGSTOP)
    with pytest.raises(CallOutcomeUnknown):
        ray.get(handle.call_tool.remote("count", timeout_s=0.1), timeout=30)
    ray.get(handle.release.remote(), timeout=30)
    assert without(cluster.sandboxes(), before) == []


# --- the host ------------------------------------------------------------------------------------


def test_a_call_survives_the_death_of_its_host(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Invariant 1, design D7: the caller gets the right result, the tool ran once, state stays."""
    handle, neighbour = told(actor=density), told(actor="shared")
    ray.get([h.call_tool.remote("count") for h in (handle, neighbour)])
    references = [handle.call_tool.remote(t, {"key": t}) for t in ("hold", "ahold")]
    streamed = handle.stream_tool.remote("hold", {"key": "stream"})
    for key in ("hold", "ahold", "stream"):
        witness.wait_for(f"began {key}")
    kill(actor_pid(host_of(handle)))
    for key in ("hold", "ahold", "stream"):
        ray.get(handle.write_file.remote(key, ""), timeout=60)
    assert [r.data for r in ray.get(references, timeout=60)] == ["held hold", "held ahold"]
    assert [ray.get(item, timeout=60) for item in streamed][-1].data == "held stream"
    heard = witness.heard()
    assert sorted(heard) == sorted(
        f"{verb} {key}" for verb in ("began", "ended") for key in ("hold", "ahold", "stream")
    )
    info = ray.get(handle.info.remote())
    assert (info.generation, info.status) == (1, InstanceStatus.RUNNING)
    assert [ray.get(h.call_tool.remote("count")).data for h in (handle, neighbour)] == [2, 2]
    assert ray.get(handle.exec.remote("echo on")).text() == "on\n"
    assert handle.instance_id in [i.id for i in aenv_ray.list_instances()]


def test_a_flood_of_calls_survives_two_deaths_of_their_host(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Invariant 1: of 300 calls in flight, batches among them, each runs exactly once."""
    handle = told(actor=density)
    single = [handle.call_tool.remote("note", {"line": str(n)}) for n in range(200)]
    batch = handle.call_tools.remote([("note", {"line": str(n)}) for n in range(200, 300)])
    for _ in range(2):
        kill(actor_pid(host_of(handle)))
    results = ray.get(single, timeout=90) + ray.get(batch, timeout=90)
    assert not [r for r in results if r.is_error]
    lines = ray.get(handle.read_file.remote("notes.txt"), timeout=60).decode().split()
    assert sorted(map(int, lines)) == list(range(300))
    heard = witness.heard()
    assert len(heard) == len(set(heard))


def test_facts_survive_the_death_of_the_host(told: Callable[..., Any], density: str) -> None:
    """Deadline, labels, isolation and density are those of before; a renewal too."""
    handle = told(actor=density, ttl="20m", labels={"a": "b"}, owner="ada")
    before = ray.get(handle.renew.remote("1h"))
    kill(actor_pid(host_of(handle)))
    after = ray.get(handle.info.remote(), timeout=60)
    assert after.model_copy(update={"generation": 0, "calls": before.calls}) == before


def test_a_ttl_passes_while_the_host_is_away(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Invariant 3: the launcher keeps the deadline when no host does."""
    before = cluster.sandboxes()
    handle = told(actor=density, ttl="1s")
    host = host_of(handle)
    pid = actor_pid(host)
    kill(pid, signal.SIGSTOP)
    try:
        eventually_empty(lambda: without(cluster.sandboxes(), before))
    finally:
        kill(pid)
    with pytest.raises(InstanceExpired, match="TTL"):
        ray.get(handle.call_tool.remote("count"), timeout=60)


def test_release_while_the_host_is_dead(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Invariant 4: a release right after the host's death ends the instance."""
    before = cluster.sandboxes()
    handle = told(actor=density)
    kill(actor_pid(host_of(handle)))
    ray.get(handle.release.remote(), timeout=60)
    eventually_empty(lambda: without(cluster.sandboxes(), before))
    assert handle.instance_id not in [i.id for i in aenv_ray.list_instances()]


def test_a_restarted_host_takes_over_though_nobody_calls(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Design D7: else the launcher would end idle instances as those of a host that is gone."""
    handle = told(actor=density)
    records = FileInstanceStore(cluster.node_dir / "records")
    kill(actor_pid(host_of(handle)))
    eventually(lambda: getattr(records.get(handle.instance_id), "generation", 0) == 1, 60.0)
    assert ray.get(handle.call_tool.remote("count")).data == 1


def test_a_dedicated_host_that_is_killed_for_good_leaves_nothing(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """Invariant 3: `ray.kill` of the actor ends its sandbox, though no host can take it over."""
    neighbour = told(actor="dedicated")
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    ray.kill(handle._host, no_restart=True)
    eventually_empty(lambda: without(cluster.sandboxes(), before))
    assert ray.get(neighbour.call_tool.remote("count")).data == 1


def test_a_host_that_dies_while_it_creates(cluster: Cluster) -> None:
    """A create under way when its host dies ends with working instances, no more than asked for."""
    before = cluster.sandboxes()
    warm = aenv_ray.create(PROBE, actor="shared")
    host = host_of(warm)
    pid = actor_pid(host)

    @ray.remote(num_cpus=0)
    def many(path: str) -> Any:
        import aenv_ray as fabric

        return fabric.create_many(path, 60, actor="shared")

    reference = many.remote(str(PROBE))
    eventually(lambda: len(without(cluster.sandboxes(), before)) > 5, 60)
    kill(pid)
    group = ray.get(reference, timeout=90)
    results = ray.get([h.call_tool.remote("count") for h in [*group, warm]], timeout=60)
    assert [r.data for r in results] == [1] * 61
    cluster.appeared(before, 61)
    ray.get([h.release.remote() for h in [*group, warm]], timeout=60)


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
    kill(controller, signal.SIGSTOP)
    try:
        other.kill()
        eventually(lambda: job in ray_api.dead_jobs(), 30.0)
    finally:
        kill(controller)
    eventually_empty(lambda: without(cluster.sandboxes(), before), 3 * GONE_S)


def test_a_host_killed_for_good_before_its_record_was_written_leaves_nothing(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """Invariant 3: the store says which engine the host was about to use."""
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    store = FileInstanceStore(cluster.node_dir / "records")
    store.delete([handle.instance_id])
    assert handle.instance_id in store.engines_used()
    ray.kill(handle._host, no_restart=True)
    eventually_empty(lambda: without(cluster.sandboxes(), before), 2 * GONE_S)
    eventually(lambda: handle.instance_id not in store.engines_used())


def test_a_host_killed_while_the_controller_is_away_leaves_nothing(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """Invariant 3: a controller that is back looks for what was left meanwhile."""
    before = cluster.sandboxes()
    handle = told(actor="dedicated")
    controller = actor_pid(ray_api.find_actor(CONTROLLER_NAME))
    kill(controller, signal.SIGSTOP)
    try:
        ray.kill(handle._host, no_restart=True)
        eventually(lambda: handle.instance_id not in ray_api.actor_names())
    finally:
        kill(controller)
    eventually_empty(lambda: without(cluster.sandboxes(), before), 2 * GONE_S)


# --- the launcher --------------------------------------------------------------------------------


def test_the_death_of_the_launcher_is_the_death_of_its_sandboxes(
    told: Callable[..., Any], cluster: Cluster, witness: Witness
) -> None:
    """All are `SandboxLost` at once, no process stays, and new creates work at both densities."""
    handles = [told(actor=a) for a in ("shared", "shared", "dedicated")]
    reference = handles[0].call_tool.remote("hold", {"key": "k"})
    witness.wait_for("began k")
    (pid,) = launcher_pids(cluster.node_dir)
    kill(pid)
    with pytest.raises(SandboxLost, match="launcher"):
        ray.get(reference, timeout=GONE_S)
    eventually_empty(cluster.sandboxes)
    for handle in handles:
        with pytest.raises(SandboxLost):
            ray.get(handle.call_tool.remote("count"), timeout=GONE_S)
    ray.get([handle.release.remote() for handle in handles], timeout=60)
    for actor in ("shared", "dedicated"):
        assert ray.get(told(actor=actor).call_tool.remote("count")).data == 1
    assert witness.heard() == ["began k"]


def test_launcher_and_host_die_together(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """A restarted host that finds neither launcher nor sandbox says `SandboxLost`."""
    handle = told(actor=density)
    host = actor_pid(host_of(handle))
    (launcher,) = launcher_pids(cluster.node_dir)
    kill(host, signal.SIGSTOP)
    kill(launcher)
    kill(host)
    with pytest.raises(SandboxLost):
        ray.get(handle.call_tool.remote("count"), timeout=60)
    assert ray.get(told(actor=density).call_tool.remote("count")).data == 1


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
    eventually_empty(lambda: ours(short_dir), 20.0)


def test_a_local_ray_ends_with_its_driver(driver: Callable[..., Driver], short_dir: Path) -> None:
    """A program that just ends leaves nothing, though it released nothing."""
    alone = driver(LOCAL_CLUSTER.format(path=str(PROBE)) + "say(1)", alone=short_dir)
    alone.said()
    alone.finish()
    eventually_empty(lambda: processes_of(short_dir), 20.0)


def test_a_killed_raylet_leaves_no_sandbox(driver: Callable[..., Driver], short_dir: Path) -> None:
    """What `ray stop --force` does to a node: launcher and sandboxes go with the raylet."""
    alone = driver(LOCAL_CLUSTER.format(path=str(PROBE)) + "say(1)", alone=short_dir)
    alone.said()
    (raylet,) = [
        pid for pid, command in processes_of(short_dir).items() if "/raylet/raylet" in command
    ]
    kill(raylet)
    eventually_empty(lambda: ours(short_dir))
    alone.kill()


# --- the caller ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["hold", "ahold"])
def test_a_cancelled_call_is_told_to_stop(
    told: Callable[..., Any], witness: Witness, density: str, tool: str
) -> None:
    """Invariant 11: `ray.cancel` reaches the tool; the instance stays usable."""
    handle = told(actor=density)
    reference = handle.call_tool.remote(tool, {"key": "k"})
    witness.wait_for("began k")
    ray.cancel(reference)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(reference, timeout=GONE_S)
    witness.wait_for("interrupted k")
    assert ray.get(handle.call_tool.remote("count")).data == 1
    assert witness.heard() == ["began k", "interrupted k"]


def test_a_cancelled_task_of_the_client_cancels_its_call(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Invariant 11: `CancelledError` passes through `Environment`, and the tool is told."""
    handle = told(actor=density)

    async def cancel_one() -> None:
        env = await Environment.attach(handle.instance_id)
        call = asyncio.create_task(env.call_tool("hold", {"key": "k"}))
        await asyncio.to_thread(witness.wait_for, "began k")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(witness.wait_for, "interrupted k")
        assert (await env.call_tool("count")).data == 1

    asyncio.run(cancel_one())


def test_a_call_of_a_driver_that_died_ends_at_its_deadline(
    told: Callable[..., Any], driver: Callable[..., Driver], witness: Witness
) -> None:
    """Nobody waits any more: the tool is stopped at the call's deadline, the instance lives on."""
    handle = told(lifetime="detached")
    other = driver(
        f"env = aenv_ray.get({handle.instance_id!r})\n"
        "env.call_tool.remote('hold', {'key': 'k'}, timeout_s=3)\nsay(1)"
    )
    other.said()
    witness.wait_for("began k")
    other.kill()
    witness.wait_for("interrupted k")
    assert ray.get(handle.call_tool.remote("count")).data == 1


# --- unruly tools and callers --------------------------------------------------------------------


def test_a_thousand_calls_at_once(told: Callable[..., Any], density: str) -> None:
    """Each of 1,000 concurrent calls gets its own result, and none is lost or run twice."""
    handle = told(actor=density)
    references = [handle.call_tool.remote("add", {"a": n, "b": 0}) for n in range(500)]
    counts = [handle.call_tool.remote("count") for _ in range(500)]
    assert [r.data for r in ray.get(references, timeout=60)] == list(range(500))
    assert sorted(r.data for r in ray.get(counts, timeout=60)) == list(range(1, 501))


def test_many_slow_calls_block_no_quick_one(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Fifty calls that wait leave an instance that answers."""
    handle = told(actor=density)
    slow = [handle.call_tool.remote("hold", {"key": "go"}) for _ in range(50)]
    eventually(lambda: witness.heard().count("began go") == 50, what=lambda: "not all began")
    assert ray.get(handle.call_tool.remote("count"), timeout=GONE_S).data == 1
    ray.get(handle.write_file.remote("go", ""))
    assert [r.data for r in ray.get(slow, timeout=30)] == ["held go"] * 50


def test_a_hanging_tool_is_a_timeout_and_the_instance_goes_on(
    told: Callable[..., Any], density: str
) -> None:
    """A tool in a system call without end: `ToolTimeout`, then calls and release work."""
    handle = told(actor=density)
    with pytest.raises(ToolTimeout, match="block"):
        ray.get(handle.call_tool.remote("block", timeout_s=0.3), timeout=GONE_S)
    assert ray.get(handle.call_tool.remote("count")).data == 1
    ray.get(handle.release.remote(), timeout=GONE_S)


def test_a_timeout_tells_the_tool(told: Callable[..., Any], witness: Witness, density: str) -> None:
    """A tool that can be interrupted is, at its deadline."""
    handle = told(actor=density)
    for tool in ("hold", "ahold"):
        with pytest.raises(ToolTimeout):
            ray.get(handle.call_tool.remote(tool, {"key": tool}, timeout_s=0.3), timeout=GONE_S)
        witness.wait_for(f"interrupted {tool}")


def test_fifty_megabytes_of_output(
    told: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """What a tool prints goes to a log that stays small; the call's result is untouched."""
    handle = told(actor=density)
    assert ray.get(handle.call_tool.remote("shout", {"megabytes": 50}), timeout=60).data == 50
    log = cluster.node_dir / "log" / short_name(handle.instance_id)
    eventually(lambda: log.stat().st_size <= LOG_LIMIT_BYTES, what=lambda: "the log keeps growing")
    assert log.read_bytes().startswith(b"[log cut: ")
    assert ray.get(handle.call_tool.remote("count")).data == 1


def test_an_instance_that_ended_is_forgotten_by_the_cluster(
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """After a release neither `get` nor `list_instances` knows it, and its files are gone."""
    before = cluster.traces()
    handle = told()
    assert without(cluster.traces(), before)
    ray.get(handle.release.remote())
    assert without(cluster.traces(), before) == []
    with pytest.raises(InstanceNotFound):
        aenv_ray.get(handle.instance_id)
