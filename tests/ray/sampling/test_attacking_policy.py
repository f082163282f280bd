"""A policy that attacks the books: it tries to void the episodes in which it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.errors import AenvError
from aenv_ray.sampling import EpisodeStatus, Summary, Task
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE
from tests.ray.sampling.policies import MINI, mini_tasks, probe_tasks

__all__ = ["mini_tasks"]  # a fixture

_ATTACKS: Final = (
    "kill -INT 1; kill -TERM 1; kill -KILL 1; kill -HUP 1",
    "for n in $(seq 1 64); do kill -$n 1; done",
    "sh -c 'while :; do sleep 600 & done' 2>/dev/null",
    "head -c 300000000 /dev/zero > /tmp/full; head -c 300000000 /dev/zero > full",
    "kill -KILL -1",
    "kill -STOP -1",
)


def _mean(tasks: list[Task], *, attacks: bool) -> Summary:
    async def act(env: Any, task: Task) -> None:
        index = [one.id for one in tasks].index(task.id)
        for call in task.reference if index % 2 else task.wrong:
            await env.call_tool(call.tool, call.arguments)
        if attacks and not index % 2:
            for attack in _ATTACKS:
                try:
                    await env.call_tool("execute_command", {"command": attack}, timeout_s=5.0)
                except AenvError:
                    continue

    return aenv_ray.sample(MINI, act, tasks, concurrency=4).run()


def test_attacks_of_an_agent_on_its_sandbox_change_no_mean(
    cluster: Cluster, mini_tasks: list[Task]
) -> None:
    """Invariant 14: the mean is that of the same policy without them, and no episode is void."""
    del cluster
    honest, attacked = _mean(mini_tasks, attacks=False), _mean(mini_tasks, attacks=True)
    assert honest.reward_mean == attacked.reward_mean == 0.5
    assert attacked.infra_failed == attacked.reward_failed == attacked.policy_failed == 0


def test_an_agent_that_controls_the_runtime_gains_nothing(cluster: Cluster) -> None:
    """Invariant 14: where a tool can end the runtime, the episode counts once."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        if task.id == "t0":
            await env.call_tool("leave", {"code": 137})

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(2))
    summary = sampling.run()
    assert (summary.died_inside, summary.infra_failed, summary.reward_mean) == (1, 0, 0.25)
    died = next(e for e in sampling.episodes if e.status is EpisodeStatus.DIED_INSIDE)
    assert (died.task_id, died.attempts) == ("t0", 1)


_SABOTAGED: Final = '''
import ctypes, json, time
from pathlib import Path
from aenv_ray.runtime import register_reward, register_tool

@register_tool
def wait(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)

@register_tool
def seize(seconds: int) -> None:
    """Keep the interpreter to itself, as a slow regular expression does."""
    ctypes.PyDLL(None).sleep(seconds)

@register_reward
def score() -> float:
    """Read what the agent wrote."""
    answer = Path("answer.json")
    return json.loads(answer.read_text())["score"] if answer.exists() else 0.0
'''


def test_episodes_that_stall_or_break_the_reward_count(
    cluster: Cluster, project: Callable[..., Path]
) -> None:
    """Invariant 14: a losing agent gains nothing by either, and its episode is not repeated."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        if task.id == "waits":
            await env.call_tool("wait", {"seconds": 600}, timeout_s=600)
        elif task.id == "times-out":
            await env.call_tool("wait", {"seconds": 600}, timeout_s=0.2)
        elif task.id == "is-silent":
            await env.call_tool("seize", {"seconds": 14}, timeout_s=1.5)
        elif task.id == "breaks-reward":
            await env.write_file("answer.json", "{")
        elif task.id == "wins":
            await env.write_file("answer.json", '{"score": 1}')

    names = ("waits", "times-out", "is-silent", "breaks-reward", "wins", "loses")
    sampling = aenv_ray.sample(
        project(_SABOTAGED), act, [{"id": name} for name in names], episode_timeout="25s"
    )
    summary = sampling.run()
    found = {e.task_id: (e.status.value, e.reward, e.attempts) for e in sampling.episodes}
    assert found == {
        "waits": ("timed_out", 0.0, 1),
        "times-out": ("timed_out", 0.0, 1),
        "is-silent": ("died_inside", 0.0, 1),
        "breaks-reward": ("reward_failed", 0.0, 1),
        "wins": ("completed", 1.0, 1),
        "loses": ("completed", 0.0, 1),
    }
    assert summary.reward_mean == pytest.approx(1 / 6)
