"""Callers that give up and tools that misbehave: the instance and its neighbours continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.client import Environment
from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.process.logs import LOG_LIMIT_BYTES
from aenv_ray.errors import InsideCause, InstanceNotFound, SandboxDiedInside, ToolTimeout
from aenv_ray.testing.contract_bench import write_project
from tests.ray.cluster import Cluster
from tests.ray.faults import GONE_S, Driver, Witness, eventually, without

# --- the caller ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["hold", "ahold"])
def test_a_cancelled_call_is_told_to_stop(
    told: Callable[..., Any], witness: Witness, tool: str
) -> None:
    """Invariant 11: `ray.cancel` reaches the tool; the instance stays usable."""
    handle = told()
    reference = handle.call_tool.remote(tool, {"key": "k"})
    witness.wait_for("began k")
    ray.cancel(reference)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(reference, timeout=GONE_S)
    witness.wait_for("interrupted k")
    assert ray.get(handle.call_tool.remote("count")).data == 1
    assert witness.heard() == ["began k", "interrupted k"]


def test_a_cancelled_task_of_the_client_cancels_its_call(
    told: Callable[..., Any], witness: Witness
) -> None:
    """Invariant 11: `CancelledError` passes through `Environment`, and the tool is cancelled."""
    handle = told()

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


@pytest.mark.timeout(240)
def test_a_thousand_calls_at_once(told: Callable[..., Any]) -> None:
    """Each of 1,000 concurrent calls gets its own result, and none is lost or run twice."""
    handle = told()
    references = [handle.call_tool.remote("add", {"a": n, "b": 0}) for n in range(500)]
    counts = [handle.call_tool.remote("count") for _ in range(500)]
    # Longer than a call's own deadline: whoever loses one is heard.
    assert [r.data for r in ray.get(references, timeout=100)] == list(range(500))
    assert sorted(r.data for r in ray.get(counts, timeout=100)) == list(range(1, 501))


def test_many_slow_calls_block_no_quick_one(told: Callable[..., Any], witness: Witness) -> None:
    """Fifty calls that wait leave an instance that answers."""
    handle = told()
    slow = [handle.call_tool.remote("hold", {"key": "go"}) for _ in range(50)]
    eventually(lambda: witness.heard().count("began go") == 50, what=lambda: "not all began")
    assert ray.get(handle.call_tool.remote("count"), timeout=GONE_S).data == 1
    ray.get(handle.write_file.remote("go", ""))
    assert [r.data for r in ray.get(slow, timeout=30)] == ["held go"] * 50


def test_a_hanging_tool_is_a_timeout_and_the_instance_goes_on(told: Callable[..., Any]) -> None:
    """A tool in a system call without end: `ToolTimeout`, then calls and release work."""
    handle = told()
    with pytest.raises(ToolTimeout, match="block"):
        ray.get(handle.call_tool.remote("block", timeout_s=0.3), timeout=GONE_S)
    assert ray.get(handle.call_tool.remote("count")).data == 1
    ray.get(handle.release.remote(), timeout=GONE_S)


def test_a_timeout_tells_the_tool(told: Callable[..., Any], witness: Witness) -> None:
    """A tool that can be interrupted is, at its deadline."""
    handle = told()
    for tool in ("hold", "ahold"):
        with pytest.raises(ToolTimeout):
            ray.get(handle.call_tool.remote(tool, {"key": tool}, timeout_s=0.3), timeout=GONE_S)
        witness.wait_for(f"interrupted {tool}")


def test_fifty_megabytes_of_output(told: Callable[..., Any], cluster: Cluster) -> None:
    """What a tool prints goes to a log that stays small; the call's result is untouched."""
    handle = told()
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


@pytest.mark.namespaces
def test_an_instance_that_hoards_memory_affects_no_other(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """Invariants 7 and 14: Ray and the neighbours continue, and the call has an outcome."""
    neighbour = make()
    config = {"deployConfig": {"memory": "128M", "network": "none"}}
    tools = "from aenv import register_tool\n\n\n@register_tool\ndef idle() -> None: ...\n"
    project = write_project(tmp_path, {"tools.py": tools}, config)
    hoard = (
        "import os, signal; kept = os.memfd_create('kept')\n"
        "for _ in range(300): os.write(kept, bytes(1 << 20))\n"
        "signal.pause()"
    )
    hoarder = make(project)
    with pytest.raises(SandboxDiedInside) as died:
        ray.get(hoarder.exec.remote(["python3", "-c", hoard]), timeout=GONE_S)
    assert died.value.died_of is InsideCause.MEMORY
    assert not ray.get(neighbour.call_tool.remote("count")).is_error
    assert ray.get(ray.remote(lambda: "alive").remote(), timeout=GONE_S) == "alive"
