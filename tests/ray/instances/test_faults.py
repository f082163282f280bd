"""Whatever is killed on a node: no call runs twice, each gets a result or a typed error.

Each test kills something for real. The witness, a socket of the test, hears what tools really did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.errors import CallOutcomeUnknown, InstanceExpired, SandboxLost
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.models import InstanceStatus
from tests.ray.cluster import Cluster
from tests.ray.faults import (
    GONE_S,
    PROBE,
    Witness,
    actor_pid,
    eventually,
    eventually_empty,
    host_of,
    kill,
    launcher_pids,
    stop,
    without,
)

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
    told: Callable[..., Any], cluster: Cluster
) -> None:
    """A sandbox that does not answer: `CallOutcomeUnknown`, never a guess; release ends it."""
    before = cluster.sandboxes()
    handle = told(actor="shared")
    stop(cluster.appeared(before)[0])
    with pytest.raises(CallOutcomeUnknown):
        ray.get(handle.call_tool.remote("count", timeout_s=0.1), timeout=30)
    ray.get(handle.release.remote(), timeout=30)
    assert without(cluster.sandboxes(), before) == []


# --- the host ------------------------------------------------------------------------------------


def test_a_call_survives_the_death_of_its_host(
    told: Callable[..., Any], witness: Witness, density: str
) -> None:
    """Invariant 1: the caller gets the right result, the tool ran once, state stays."""
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
    stop(pid)
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
    """Else the launcher would end idle instances as those of a host that is gone."""
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
    stop(host)
    kill(launcher)
    kill(host)
    with pytest.raises(SandboxLost):
        ray.get(handle.call_tool.remote("count"), timeout=60)
    assert ray.get(told(actor=density).call_tool.remote("count")).data == 1
