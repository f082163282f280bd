"""An agent opens inner instances of other environments, as many as a tool lets it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.fabric import quota_client
from aenv_ray.actors.fabric.driver_api import init
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    FunctionFailed,
    QuotaExceeded,
    is_infrastructure,
)
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import HubClient, blocking
from aenv_ray.hub.records import Quota
from tests.contract.hub.hub_contract import entry
from tests.ray.cluster import Cluster
from tests.ray.conftest import make, nothing_left, project

__all__ = ["make", "nothing_left", "project"]

pytestmark = [pytest.mark.ray, pytest.mark.redis]

INNER = 2
CONFIG = """
{"name": "outer", "deployConfig": {
    "network": "none", "environments": ["mini-terminal"], "innerInstances": 2}}
"""
SOURCE = """
import threading
from typing import Any
from aenv_ray.runtime import current_call, register_function, register_reward, register_tool

begun, done = threading.Event(), threading.Event()


@register_tool
def run(command: str, key: str) -> Any:
    inner = current_call().env("mini-terminal", key)
    return inner.call_tool("execute_command", {"command": command})


@register_reward
def score() -> float:
    return float("done" in str(run("cat mark", "0")))


@register_reward(name="slow")
def slow() -> float:
    run("rm -f mark", "0")
    begun.set()
    assert done.wait(60)
    return score()


@register_function
def has_begun() -> bool:
    return begun.wait(60)


@register_function
def finish() -> None:
    done.set()
"""


@pytest.fixture
def hub(cluster: Cluster) -> Iterator[HubClient]:
    del cluster
    init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quota_client, "FRESH_S", 0.0)
        yield hub_actor.ensure_hub()
    blocking(hub_actor.ensure_hub().delete_quota("owner:eve"))
    hub_actor.end_hub()


@pytest.fixture
def outer(project: Callable[..., Path]) -> Path:
    return project(SOURCE, config=CONFIG)


def run(handle: Any, command: str, key: int) -> str:
    import ray

    return str(ray.get(handle.call_tool.remote("run", {"command": command, "key": str(key)})).data)


def test_an_agent_that_opens_many_inner_instances_uses_up_no_quota(
    hub: HubClient, make: Callable[..., Any], outer: Path
) -> None:
    """Invariants 14 and 15: neither its episode nor others of its owner become void."""
    blocking(hub.set_quota(Quota(subject="owner:eve", max_instances=2 * (1 + INNER))))
    attacker, victim = make(outer, owner="eve"), make(outer, owner="eve")
    with pytest.raises(QuotaExceeded, match=r"6 of 6 instances.* inner instances"):
        make(outer, owner="eve")
    for key in range(8):
        if key < INNER:
            assert "mine" in run(attacker, "echo mine", key)
            continue
        with pytest.raises(FunctionFailed, match=f"may have {INNER} inner") as raised:
            run(attacker, "echo mine", key)
        assert not is_infrastructure(raised.value)
    for key in range(INNER):
        assert "theirs" in run(victim, "echo theirs", key)
    assert blocking(hub.quotas())["owner:eve"] == (6, 6)
    inner = [info for info in aenv_ray.list_instances() if OUTER_LABEL in info.labels]
    assert len(inner) == 2 * INNER
    assert "mine" in run(attacker, "echo mine", 0), "it lives on"


def test_a_version_of_another_owner_is_not_called_by_the_name_of_a_built_in_environment(
    hub: HubClient, make: Callable[..., Any], project: Callable[..., Path]
) -> None:
    """Invariant 15: the version decides whether an environment is built in, not its name alone."""
    reference = "mini-terminal@9.0.0"
    blocking(hub.push(entry("mini-terminal", "9.0.0", owner="alice"), is_admin=True))
    source = SOURCE.replace('env("mini-terminal"', f'env("{reference}"')
    config = CONFIG.replace('["mini-terminal"]', f'["{reference}"]')
    eve = make(project(source, config=config), owner="eve")
    with pytest.raises(AenvError, match="eve may not use it"):
        run(eve, "true", 0)


def test_episodes_with_too_many_inner_instances_count(
    hub: HubClient, outer: Path, make: Callable[..., Any]
) -> None:
    """Invariant 14: the agent even takes the place of the one that the reward would call."""
    del make
    blocking(hub.set_quota(Quota(subject="owner:eve", max_instances=1 + INNER)))

    async def act(env: Any, task: Any) -> None:
        del task
        for key in range(7, 0, -1):
            with contextlib.suppress(FunctionFailed):
                await env.call_tool("run", {"command": "true", "key": str(key)})

    tasks = [{"id": str(number)} for number in range(3)]
    summary = aenv_ray.sample(outer, act, tasks, concurrency=3, owner="eve").run()
    assert (summary.rollouts, summary.infra_failed) == (3, 0)
    assert (summary.reward_failed, summary.reward_mean) == (3, 0.0)


def test_nobody_acts_in_an_inner_instance_while_a_reward_of_the_outer_one_runs(
    hub: HubClient, make: Callable[..., Any], outer: Path
) -> None:
    """Invariant 14, boundary D19: not through its own handle either; the reward itself may."""
    import ray

    del hub

    handle = make(outer, owner="eve")
    run(handle, "true", 0)
    found = aenv_ray.list_instances()
    (inner_id,) = [i.id for i in found if i.labels.get(OUTER_LABEL) == handle.instance_id]
    inner = aenv_ray.get(inner_id)
    forge = "execute_command", {"command": "echo done > mark"}
    graded = handle.call_reward.remote(name="slow")
    assert ray.get(handle.call_function.remote("has_begun"))
    for refused in (
        inner.call_tool.remote(*forge),
        inner.exec.remote("echo done > mark"),
        handle.call_tool.remote("run", {"command": "echo done > mark", "key": "0"}),
    ):
        with pytest.raises(CallCancelled, match="a reward of the instance is under way"):
            ray.get(refused)
    ray.get(handle.call_function.remote("finish"))
    assert ray.get(graded) == 0.0
    assert not ray.get(inner.call_tool.remote(*forge)).is_error
    assert "done" in run(handle, "cat mark", 0)
