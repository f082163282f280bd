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
    """Invariant 14: other episodes continue, and its own counts."""
    call = {"arguments": {"code": None}}
    if where == "submission":
        call["function"] = "answer"  # type: ignore[assignment]  # of a JSON object
    tasks = [{"id": code, where: {**call, "arguments": {"code": code}}} for code in ("", *CODES)]
    found = played(hostile, act, [task for task in tasks if where == "reward" or task["id"]])
    assert found.keys() >= set(CODES)
    for code in CODES:
        episode = found[code]
        assert episode.status in OUTCOMES, (code, episode.error)
        assert episode.reward == 0.0, (code, episode.status)


SUBMITTED = """
from aenv_ray.runtime import register_function, register_reward, register_tool


@register_tool
def act(code: str = "") -> int:
    return 1


@register_function
def answer(data: object) -> object:
    return data


@register_reward
def score(submission: dict[str, int], scale: int = 1) -> float:
    return 1.0


@register_reward
def constant() -> float:
    return 1.0
"""
WRONG_REWARDS: dict[str, dict[str, Any]] = {
    "no reward": {"name": "none"},
    "unknown argument": {"name": "score", "arguments": {"typo": 1}},
    "wrong argument": {"name": "score", "arguments": {"scale": "x"}},
    "no parameter": {"name": "constant"},
}


def test_no_submission_voids_the_episode(
    cluster: Cluster, nothing_left: None, project: Callable[..., Path]
) -> None:
    """Invariant 14: an agent chooses the argument of a reward. A wrong reward is the task's."""
    del cluster, nothing_left
    given: dict[str, Any] = {"list": [], "text": "x", "values": {"a": "x"}, "right": {"a": 1}}
    tasks = [
        {"id": name, "submission": {"function": "answer", "arguments": {"data": data}}}
        for name, data in given.items()
    ]
    tasks += [{**tasks[-1], "id": name, "reward": call} for name, call in WRONG_REWARDS.items()]
    found = played(project(SUBMITTED), act, tasks)
    failed = (EpisodeStatus.REWARD_FAILED, 0.0)
    assert {name: (one.status, one.reward) for name, one in found.items()} == {
        "list": failed,
        "text": failed,
        "values": failed,
        "right": (EpisodeStatus.COMPLETED, 1.0),
        **dict.fromkeys(WRONG_REWARDS, (EpisodeStatus.REWARD_FAILED, None)),
    }


def test_no_error_of_a_tool_voids_the_episode_of_a_policy_that_does_not_catch_it(
    hostile: Path,
) -> None:
    """Invariant 14: an agent makes its call fail, and the policy has no handler."""
    found = played(hostile, act, [{"id": code, "code": code} for code in CODES])
    assert found.keys() == set(CODES)
    for code, episode in found.items():
        assert episode.reward == 0.0, (code, episode.status, episode.error)


HIJACK = """
from aenv_ray.runtime import register_reward, register_tool
from aenv_ray.runtime.door.door import Connection

send = Connection._send


@register_tool
def hijack(answer: str) -> int:
    def forged(self, data):
        head = data[:data.index(b",", 17) + 1]  # the id
        send(self, head + answer.encode() + b"}\\n" if forged.used else data)
        forged.used = True

    forged.used = False
    Connection._send = forged
    return 1


@register_tool
def act() -> int:
    return 1


@register_reward
def score() -> float:
    return 1.0
"""
FORGED = {
    "text": '"result":{"content":[{"type":"text","text":5}]}',
    "structured": '"result":{"content":[],"structuredContent":[1]}',
    "meta": '"result":{"content":[],"_meta":[]}',
    "wrapped": '"result":{"content":[],"structuredContent":{},"_meta":{"aenv/wrapped":true}}',
    "deep": '"result":' + "[" * 5000 + "]" * 5000,
    "integer": '"result":' + "1" * 5000,
    "nothing": '"other":1',
    "error without data": '"error":7',
    "odd error": '"error":{"message":[],"data":{"code":[],"hint":{},"tool_name":7}}',
    "tools": '"result":{"tools":[{"name":7}]}',
    "config": '"error":{"message":"m","data":{"code":"config_error","message":"m"}}',
}


@pytest.mark.parametrize("call", ["call_tool", "list_tools", "exec"])
def test_no_forged_answer_voids_the_episode_of_a_policy_that_reads_it(
    cluster: Cluster, nothing_left: None, project: Callable[..., Path], call: str
) -> None:
    """Invariant 14: a policy that trips over an answer fails by itself, which would be void."""
    del cluster, nothing_left

    async def policy(env: Any, task: Any) -> None:
        await env.call_tool("hijack", {"answer": task.answer})
        if call == "call_tool":
            result = await env.call_tool("act")
            assert isinstance(result.text(), str)
            assert (result.data, result.meta.get("a")) != 0
        elif call == "list_tools":
            for tool in await env.list_tools():
                assert tool["name"].upper() is not tool["inputSchema"].get("type")
        else:
            assert (await env.exec("true")).exit_code != "0"

    tasks = [{"id": name, "answer": answer} for name, answer in FORGED.items()]
    found = played(project(HIJACK), policy, tasks)
    assert found.keys() == FORGED.keys()
    for name, episode in found.items():
        assert episode.reward is not None, (name, episode.status, episode.error)
        assert episode.status is not EpisodeStatus.INFRA_FAILED, (name, episode.error)


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
