"""Environments that call other environments, on a real Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.errors import (
    CapacityExceeded,
    FunctionFailed,
    SandboxLost,
    ToolTimeout,
)
from aenv_ray.ids import InstanceId
from tests.ray.cluster import Cluster
from tests.ray.faults import actor_pid, eventually, eventually_empty, kill

CONFIG = """
{"name": "outer", "deployConfig": {"network": "none", "environments": ["mini-terminal", "outer"]}}
"""
SOURCE = """
import os
from typing import Any
from aenv_ray.runtime import current_call, register_reset, register_reward, register_tool


@register_tool
def run(command: str, key: str = "") -> Any:
    inner = current_call().env("mini-terminal", key)
    return inner.call_tool("execute_command", {"command": command})


@register_tool
async def run_async(command: str) -> Any:
    inner = current_call().env("mini-terminal").aio
    return await inner.call_tool("execute_command", {"command": command})


@register_tool
def tools() -> list[str]:
    return [tool["name"] for tool in current_call().env("mini-terminal").list_tools()]


@register_tool
def call(environment: str) -> Any:
    return current_call().env(environment).list_tools()


@register_tool
def pid() -> int:
    return os.getpid()


@register_reward
def score() -> float:
    return float("done" in str(run("cat mark")))


@register_reward(name="sleeping")
def sleeping() -> int:
    found = run("cat /proc/[0-9]*/cmdline | tr -d '\\\\0'")
    return str(found).count("sleep777")


@register_reward(name="watching", keep_processes=True)
def watching() -> int:
    return sleeping()


@register_reset
def start_over() -> None:
    pass
"""


def inner_of(instance_id: str) -> list[Any]:
    found = aenv_ray.list_instances()
    return [info for info in found if info.labels.get(OUTER_LABEL) == instance_id]


@pytest.fixture
def outer(project: Callable[..., Path]) -> Path:
    return project(SOURCE, config=CONFIG)


def call(handle: Any, name: str, timeout_s: float = 60.0, **arguments: Any) -> Any:
    import ray

    return ray.get(handle.call_tool.remote(name, arguments, timeout_s)).data


def test_tools_call_another_environment_that_keeps_its_state_and_ends_with_the_outer_one(
    make: Callable[..., Any], outer: Path, density: str
) -> None:
    import ray

    handle = make(outer, actor=density, owner="ann", labels={"team": "blue"})
    call(handle, "run", command="echo done > mark")
    assert "done" in str(call(handle, "run_async", command="cat mark"))
    assert "done" not in str(call(handle, "run", command="cat mark", key="b"))
    assert "execute_command" in call(handle, "tools")
    assert ray.get(handle.call_reward.remote()) == 1.0
    first, second = inner_of(handle.instance_id)
    assert {(one.owner, one.labels["team"]) for one in (first, second)} == {("ann", "blue")}
    deadline = ray.get(handle.info.remote()).deadline
    assert max(first.deadline, second.deadline) <= deadline + 60.0  # their TTL begins once they run
    ray.get(handle.renew.remote("2h"))
    eventually(lambda: all(i.deadline > deadline + 600 for i in inner_of(handle.instance_id)))
    ray.get(handle.reset.remote())
    assert inner_of(handle.instance_id) == [], "a reset ends them"
    call(handle, "run", command="true")
    ray.get(handle.release.remote())
    eventually_empty(lambda: inner_of(handle.instance_id))


def test_refusals_name_the_way_out(make: Callable[..., Any], outer: Path) -> None:
    handle = make(outer)
    with pytest.raises(FunctionFailed, match=r"config_error: .* may not call math@1\.0") as raised:
        call(handle, "call", environment="math@1.0")
    assert 'add "math@1.0" to deployConfig.environments' in str(raised.value.hint)
    with pytest.raises(FunctionFailed, match=r"in a loop: outer@1\.0\.0 calls outer"):
        call(handle, "call", environment="outer")


def test_an_inner_call_ends_with_the_deadline_of_the_outer_one(
    make: Callable[..., Any], outer: Path
) -> None:
    handle = make(outer)
    call(handle, "run", command="true")
    with contextlib.suppress(ToolTimeout):  # or the terminal's own result: the command was stopped
        assert "slept" not in str(call(handle, "run", 2.0, command="sleep 50; echo slept"))
    assert "again" in str(call(handle, "run", command="echo again"))


def test_inner_instances_end_with_a_killed_outer_sandbox(
    make: Callable[..., Any], outer: Path, cluster: Cluster, density: str
) -> None:
    """Invariant 3, also when the host that knew them was killed before."""
    from aenv_ray.actors.calls.handle import host_of

    before = cluster.sandboxes()
    handle = make(outer, actor=density)
    (pid,) = cluster.appeared(before)
    call(handle, "run", command="echo done > mark")
    kill(actor_pid(host_of(handle)))
    assert "done" in str(call(handle, "run", command="cat mark")), "its successor knows it"
    kill(pid)
    with pytest.raises(SandboxLost):
        call(handle, "pid")
    eventually_empty(lambda: inner_of(handle.instance_id))


def test_a_host_that_is_killed_for_good_leaves_no_inner_instance(
    make: Callable[..., Any], outer: Path
) -> None:
    import ray

    handle = make(outer, actor="dedicated")
    call(handle, "run", command="true")
    ray.kill(handle._host, no_restart=True)
    eventually_empty(lambda: inner_of(handle.instance_id))


def test_episodes_of_a_sampler_call_other_environments(outer: Path, cluster: Cluster) -> None:
    del cluster

    async def act(env: Any, task: Any) -> None:
        del task
        await env.call_tool("run", {"command": "echo done > mark"})

    sampling = aenv_ray.sample(outer, act, [{"id": "1"}, {"id": "2"}], concurrency=2)
    summary = sampling.run()
    assert (summary.rollouts, summary.reward_mean) == (2, 1.0)
    ids = {episode.instance_id for episode in sampling.episodes}
    eventually_empty(lambda: [one for i in ids for one in inner_of(str(i))])


def test_a_reward_ends_what_tools_have_started_in_an_inner_instance(
    make: Callable[..., Any], outer: Path
) -> None:
    """Invariant 14: it could change what the reward looks at there."""
    import ray

    handle = make(outer)
    started = (
        "until cat /proc/[0-9]*/cmdline | tr -d '\\0' | grep -q 'sleep77[7]'; do sleep 0.1; done"
    )
    call(
        handle, "run",
        command=f"setsid sleep 777 >/dev/null 2>&1 & {started}; echo done > mark",
    )  # fmt: skip
    found = ray.get(handle.call_reward.remote(name="watching"))
    assert found > 0, "setsid may be there beside it for a moment"
    assert ray.get(handle.call_reward.remote(name="sleeping")) == 0.0
    assert ray.get(handle.call_reward.remote()) == 1.0, "its files stay, and its terminal works"


def test_a_full_cluster_delays_no_inner_instance(make: Callable[..., Any], outer: Path) -> None:
    """Invariants 2 and 14: its slot was taken when the outer one was created."""
    import ray

    from aenv_ray.actors.calls.handle import host_of

    handle = make(outer)
    host = host_of(handle)
    taken, capacity = ray.get(host.load.remote())
    others = [InstanceId(f"other-{number:08}") for number in range(capacity - taken)]
    assert ray.get(host.reserve.remote(others, 60.0))
    try:
        with pytest.raises(CapacityExceeded):
            aenv_ray.create(outer, actor="shared", queue_timeout=0)
        assert "mine" in str(call(handle, "run", command="echo mine; echo done > mark"))
        assert ray.get(handle.call_reward.remote()) == 1.0
        (inner,) = inner_of(handle.instance_id)
        assert inner.host == ray.get(handle.info.remote()).host
        assert ray.get(host.load.remote()) == (capacity, capacity)
    finally:
        ray.get(host.reserve.remote(others, 0.0))
