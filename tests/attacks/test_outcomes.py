"""Code in a sandbox answers calls of the sampler with errors of its choice.

An agent whose code runs in the runtime can do that, and a reward can be made to, for example by
using up the inner instances that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ERRORS, INFRASTRUCTURE
from aenv_ray.sampling import EpisodeStatus
from tests.ray.cluster import Cluster
from tests.ray.conftest import nothing_left, project

__all__ = ["nothing_left", "project"]

pytestmark = pytest.mark.ray

SOURCE = """
from aenv_ray.runtime import register_function, register_reset, register_reward, register_tool
from aenv_ray.runtime.faults import Fault

answers = []


@register_tool
def act(code: str = "") -> int:
    if code:
        raise Fault(code, "forged")
    return 1


@register_function
def answer(code: str = "") -> int:
    return act(code)


@register_reward
def score(code: str = "") -> float:
    act(code)
    return 1.0
"""
RESET = """

@register_tool
def poison(code: str) -> None:
    answers.append(code)


@register_reset
def start_over() -> None:
    if answers:
        raise Fault(answers[0], "forged")
"""
CODES = [error.code for error in ERRORS]
OUTCOMES = {EpisodeStatus.REWARD_FAILED, EpisodeStatus.DIED_INSIDE, EpisodeStatus.TIMED_OUT}


@pytest.fixture
def hostile(cluster: Cluster, nothing_left: None, project: Callable[..., Path]) -> Path:
    del cluster, nothing_left
    return project(SOURCE)


async def act(env: Any, task: Any) -> None:
    await env.call_tool("act", {"code": getattr(task, "code", "")})


def played(environment: Path, policy: Any, tasks: list[dict[str, Any]], **options: Any) -> Any:
    sampling = aenv_ray.sample(environment, policy, tasks, infra_retries=0, **options)
    sampling.run()
    return {episode.task_id: episode for episode in sampling.episodes}


@pytest.mark.parametrize("where", ["reward", "submission"])
def test_no_error_of_a_reward_ends_the_run_or_voids_the_episode(hostile: Path, where: str) -> None:
    """Invariant 14: others' episodes go on, and its own counts."""
    call = {"arguments": {"code": None}}
    if where == "submission":
        call["function"] = "answer"  # type: ignore[assignment]  # of a JSON object
    tasks = [{"id": code, where: {**call, "arguments": {"code": code}}} for code in ("", *CODES)]
    found = played(hostile, act, [task for task in tasks if where == "reward" or task["id"]])
    assert found.keys() >= set(CODES)
    for code in CODES:
        episode = found[code]
        assert episode.status in OUTCOMES, (code, episode.error)
        # What a task asks for is checked before code runs that an agent can influence.
        is_void = code in ("tool_not_found", "tool_input_invalid")
        assert (episode.reward is None) is is_void, (code, episode.status)


def test_no_error_of_a_tool_voids_the_episode_of_a_policy_that_does_not_catch_it(
    hostile: Path,
) -> None:
    """Invariant 14: an agent makes its call fail, and the policy has no handler."""
    found = played(hostile, act, [{"id": code, "code": code} for code in CODES])
    assert found.keys() == set(CODES)
    for code, episode in found.items():
        assert episode.reward == 0.0, (code, episode.status, episode.error)


def test_no_error_of_a_setup_ends_the_run(hostile: Path) -> None:
    tasks = [
        {"id": code, "setup": {"function": "answer", "arguments": {"code": code}}} for code in CODES
    ]
    found = played(hostile, act, tasks)
    assert found.keys() == set(CODES)


@pytest.mark.parametrize("code", ["config_error", "tool_not_found", "policy_refused", "forbidden"])
def test_an_instance_whose_reset_is_refused_is_not_used_again(
    cluster: Cluster, nothing_left: None, project: Callable[..., Path], code: str
) -> None:
    """Invariant 14: "it has no reset" would hand the last episode's instance to the next one."""
    del cluster, nothing_left

    async def poison(env: Any, task: Any) -> str:
        del task
        await env.call_tool("poison", {"code": code})
        return str(env.instance_id)

    tasks = [{"id": str(number)} for number in range(4)]
    found = played(project(SOURCE + RESET), poison, tasks, concurrency=1)
    assert [one.status for one in found.values()] == [EpisodeStatus.COMPLETED] * 4
    assert len({one.output for one in found.values()}) == 4, "each has an instance of its own"


def test_infrastructure_is_what_the_host_says() -> None:
    """The list above has both kinds, or the tests show nothing."""
    assert {error.code for error in INFRASTRUCTURE} < set(CODES)
