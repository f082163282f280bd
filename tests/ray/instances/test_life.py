"""How an instance ends: TTL, idle timeout, release; from every state, any number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.clock import SystemClock
from aenv_ray.errors import (
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
)
from aenv_ray.models import InstanceStatus
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import Witness, eventually, eventually_empty, without

TOOL = "from aenv_ray.runtime import register_tool\n@register_tool\ndef fine() -> int: ...\n"


def status(handle: Any) -> InstanceStatus:
    """Return the status that the instance's host reports."""
    found: InstanceStatus = ray.get(handle.info.remote()).status
    return found


def wait_for_end(handle: Any) -> None:
    """Wait by status reads, which renew nothing, until the instance has ended."""
    eventually(lambda: status(handle) is not InstanceStatus.RUNNING, what=lambda: "it lives on")


# --- TTL -----------------------------------------------------------------------------------------


def test_an_instance_ends_with_its_ttl(
    make: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Invariant 3: past its TTL it is gone, in the process table too, and calls say why."""
    before = cluster.sandboxes()
    handle = make(actor=density, ttl="1s")
    wait_for_end(handle)
    assert SystemClock().now() >= ray.get(handle.info.remote()).deadline
    assert status(handle) is InstanceStatus.TERMINATED
    with pytest.raises(InstanceExpired, match="TTL") as caught:
        ray.get(handle.call_tool.remote("count"))
    assert "renew" in str(caught.value.hint)
    assert caught.value.instance_id == handle.instance_id
    eventually_empty(lambda: without(cluster.sandboxes(), before))
    with pytest.raises(InstanceExpired):
        ray.get(handle.renew.remote("1h"))


def test_a_call_that_runs_at_the_ttl_gets_a_typed_error(
    make: Callable[..., Any], witness: Witness, density: str
) -> None:
    """A call that is under way when the TTL passes gets `InstanceExpired`, not `SandboxLost`."""
    handle = make(actor=density, ttl="1s", environment_variables=witness.variables)
    with pytest.raises(InstanceExpired, match="TTL"):
        ray.get(handle.call_tool.remote("hold", {"key": "k"}), timeout=30)


def test_renew_extends_the_ttl(make: Callable[..., Any], density: str) -> None:
    """A renewed instance lives past its first deadline; a shorter renewal takes nothing away."""
    handle = make(actor=density, ttl="1s")
    first = ray.get(handle.info.remote()).deadline
    renewed = ray.get(handle.renew.remote("1h"))
    assert renewed.deadline == pytest.approx(SystemClock().now() + 3600, abs=30)
    assert ray.get(handle.renew.remote("1s")).deadline == renewed.deadline
    eventually(lambda: SystemClock().now() > first + 1.5)
    assert ray.get(handle.call_tool.remote("count")).data == 1


def test_status_reads_renew_nothing(make: Callable[..., Any]) -> None:
    """Looking at an instance all the time does not keep it alive."""
    handle = make(idle_timeout="500ms", ttl="1h")

    def look() -> bool:
        aenv_ray.list_instances()
        aenv_ray.get(handle.instance_id)
        return status(handle) is not InstanceStatus.RUNNING

    def over() -> bool:
        try:
            return look()
        except InstanceNotFound:
            return True

    eventually(over)


def test_an_idle_instance_ends(make: Callable[..., Any], density: str) -> None:
    """Without a call for its idle timeout it ends, and calls say why."""
    handle = make(actor=density, idle_timeout="1s")
    wait_for_end(handle)
    with pytest.raises(InstanceExpired, match="idle for 1 s"):
        ray.get(handle.call_tool.remote("count"))


def test_a_call_under_way_is_not_idle(make: Callable[..., Any], witness: Witness) -> None:
    """A call longer than the idle timeout keeps its instance, and the clock starts at its end."""
    handle = make(idle_timeout="1s", environment_variables=witness.variables)
    began = SystemClock().now()
    reference = handle.call_tool.remote("hold", {"key": "k"})
    witness.wait_for("began k")
    eventually(lambda: SystemClock().now() > began + 2.5)
    ray.get(handle.write_file.remote("k", ""))
    assert ray.get(reference).data == "held k"
    assert ray.get(handle.call_tool.remote("count")).data == 1
    wait_for_end(handle)


@pytest.mark.parametrize(("asked", "lives_s"), [(None, 7200.0), ("2m", 120.0)])
def test_the_callers_ttl_wins_over_the_projects(
    make: Callable[..., Any], project: Callable[..., Path], asked: str | None, lives_s: float
) -> None:
    """`ttl` of the call, else `deployConfig.ttl`; and so for the idle timeout."""
    config = (
        '{"name": "written", "deployConfig": {"network": "none", "ttl": "2h", "idleTimeout": "3h"}}'
    )
    path = project(TOOL, config=config)
    info = ray.get(make(path, ttl=asked, idle_timeout=asked).info.remote())
    assert info.deadline - info.created_at == pytest.approx(lives_s)
    assert info.idle_timeout_s == (10_800 if asked is None else lives_s)


def test_without_any_ttl_it_is_half_an_hour(make: Callable[..., Any]) -> None:
    """AEnvironment's documented default."""
    info = ray.get(make().info.remote())
    assert info.deadline - info.created_at == pytest.approx(1800)
    assert info.idle_timeout_s is None


# --- release -------------------------------------------------------------------------------------


def test_release_ends_everything_and_is_idempotent(
    make: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Invariant 4; when `release` returns, the process is gone, and calls say that it was."""
    before = cluster.sandboxes()
    handle = make(actor=density)
    ray.get(handle.release.remote())
    assert without(cluster.sandboxes(), before) == []
    for reference in [handle.release.remote() for _ in range(3)]:
        assert ray.get(reference) is None
    with pytest.raises(InstanceReleased) as caught:
        ray.get(handle.call_tool.remote("count"))
    assert caught.value.instance_id == handle.instance_id
    for reference in (
        handle.renew.remote(),
        handle.exec.remote("true"),
        handle.list_tools.remote(),
    ):
        with pytest.raises(InstanceReleased):
            ray.get(reference)
    assert status(handle) is InstanceStatus.TERMINATED
    with pytest.raises(InstanceNotFound):
        aenv_ray.get(handle.instance_id)


def test_release_during_a_call(make: Callable[..., Any], witness: Witness, density: str) -> None:
    """The call gets `InstanceReleased` at once; the release does not wait for it."""
    handle = make(actor=density, environment_variables=witness.variables)
    references = [handle.call_tool.remote("hold", {"key": "k"}), handle.call_tool.remote("block")]
    witness.wait_for("began k")
    ray.get(handle.release.remote(), timeout=15)
    for reference in references:
        with pytest.raises(InstanceReleased):
            ray.get(reference, timeout=15)


def test_release_takes_what_tools_started(
    make: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Daemons that left their session and ignore signals go with the instance."""
    before = cluster.sandboxes()
    handle = make(actor=density)
    script = "trap '' TERM HUP INT; (setsid nohup sleep 1234 >/dev/null 2>&1 &); sleep 1234 &"
    ray.get(handle.exec.remote(["bash", "-c", script]))
    ray.get(handle.exec.remote("setsid bash -c 'trap \"\" TERM; sleep 4321' >/dev/null 2>&1 &"))
    ray.get(handle.release.remote())
    eventually_empty(lambda: without(cluster.sandboxes(), before))


def test_instances_that_have_ended_can_be_released(
    make: Callable[..., Any], cluster: Cluster, density: str
) -> None:
    """Invariant 4: expired, lost and released instances take any number of releases."""
    expired = make(actor=density, ttl="1s")
    before = cluster.sandboxes()
    dead = make(actor=density)
    signal_all(cluster.appeared(before))
    with pytest.raises(SandboxLost):
        ray.get(dead.call_tool.remote("block"))
    wait_for_end(expired)
    for handle in (expired, dead):
        ray.get([handle.release.remote() for _ in range(3)])
    with pytest.raises(InstanceExpired):
        ray.get(expired.call_tool.remote("count"))
    with pytest.raises(SandboxLost):
        ray.get(dead.call_tool.remote("count"))


def test_release_of_an_unknown_instance(cluster: Cluster, make: Callable[..., Any]) -> None:
    """Releasing an unknown instance does nothing."""
    del cluster
    handle = make()
    stranger = type(handle)("probe-zzzzzzzz", "probe@1.2.0", handle._host, handle._controller)
    assert ray.get([stranger.release.remote() for _ in range(2)]) == [None, None]
    with pytest.raises(InstanceNotFound):
        ray.get(stranger.call_tool.remote("count"))
    with pytest.raises(InstanceNotFound):
        ray.get(stranger.info.remote())
    assert ray.get(handle.call_tool.remote("count")).data == 1


def test_release_after_its_actor_is_gone(make: Callable[..., Any], cluster: Cluster) -> None:
    """Invariant 4: an instance whose actor was killed for good is ended by another host."""
    neighbour = make(actor="shared")
    before = cluster.sandboxes()
    handle = make(actor="dedicated")
    ray.kill(handle._host, no_restart=True)
    cluster.appeared(before)  # the sandbox is not the actor's child
    ray.get([handle.release.remote() for _ in range(2)])
    assert without(cluster.sandboxes(), before) == []
    assert ray.get(neighbour.call_tool.remote("count")).data == 1


def test_concurrent_releases_and_calls(make: Callable[..., Any], density: str) -> None:
    """Many callers that release and call at once get results or `InstanceReleased`."""
    handle = make(actor=density)

    async def storm() -> list[Any]:
        async def one(number: int) -> Any:
            if number % 10 == 7:
                return await handle.release.remote()
            try:
                return (await handle.call_tool.remote("add", {"a": number})).data == number + 1
            except InstanceReleased:
                return True

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(n)) for n in range(200)]
        return [task.result() for task in tasks]

    assert set(asyncio.run(storm())) == {True, None}


def test_a_handle_outlives_its_instance(make: Callable[..., Any], density: str) -> None:
    """A pickled handle of a released instance still says what became of it."""
    handle = make(actor=density)
    stored = ray.put([handle])
    ray.get(handle.release.remote())
    (again,) = ray.get(stored)
    with pytest.raises(InstanceReleased):
        ray.get(again.call_tool.remote("count"))
