"""tau2 runs by name: on a stand-in, or on the checkout of tau2-bench that AENV_TAU2 names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError, ToolNotFound
from aenv_ray.sampling import EpisodeStatus, Task, select_tasks
from aenv_ray.sampling.tasks.environment_tasks import environment_tasks
from tests.emulators.model_endpoint import completion, serving
from tests.ray.cluster import Cluster
from tests.ray.faults import Driver

STAND_IN = Path(__file__).parents[2] / "fixtures" / "tau2_bench"
GIVEN = os.environ.get("AENV_TAU2")
CHECKOUT = GIVEN or str(STAND_IN)
TASKS_OF_THE_STAND_IN = 4


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AENV_TAU2", CHECKOUT)
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_the_reference_earns_all_and_nothing_earns_nothing(cluster: Cluster) -> None:
    del cluster
    tasks = environment_tasks("tau2")
    assert GIVEN or len(tasks) == TASKS_OF_THE_STAND_IN
    for policy, mean in (("reference", 1.0), ("null", 0.0)):
        done = aenv_ray.sample("tau2", policy, tasks, concurrency=2).run()
        assert (done.reward_mean, done.rollouts) == (mean, len(tasks)), policy
        assert done.infra_failed == done.reward_failed == done.policy_failed == 0


async def attack(env: Any, task: Task) -> None:
    """Look for what is expected, forge the verdict, and then end the episode with nothing done."""
    for command in (
        "find / -name tasks.json -not -path '/proc/*' 2>/dev/null | xargs -r cat",
        "grep -ra evaluation_criteria /project /proc/1/environ /proc/1/fd 2>/dev/null",
        "for m in /proc/[0-9]*/mem; do head -c 1 $m 2>/dev/null; done",
    ):
        assert (await env.exec(command, timeout_s=20.0)).text().strip() == "", command
    for path in ("/project/src/episode.py", "/project/bench/src/tau2/registry.py"):
        with pytest.raises(AenvError):
            await env.write_file(path, "raise SystemExit")
    for name in ("tau2_reward", "start", "list_cases"):
        with pytest.raises(ToolNotFound):
            await env.call_tool(name, {})
    await env.exec("kill -9 -1; kill -9 1", timeout_s=20.0)
    await env.call_tool("tau2_done", {})


def test_an_attacker_finds_no_solution_and_forges_no_verdict(cluster: Cluster) -> None:
    """Invariant 14."""
    del cluster
    tasks = list(select_tasks(environment_tasks("tau2"), ids=["*:solo:*"], limit=2))
    for episode in aenv_ray.sample("tau2", attack, tasks, concurrency=2, runners="driver"):
        assert episode.status is EpisodeStatus.COMPLETED, episode.error
        assert episode.reward == 0.0


def test_a_checkout_that_is_missing_is_refused_before_anything_starts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = cluster.sandboxes()
    for value, words in (("", "AENV_TAU2 is not set"), (str(tmp_path), "not a copy of tau2-bench")):
        monkeypatch.setenv("AENV_TAU2", value)
        settings.cache_clear()
        with pytest.raises(ConfigError, match=words) as raised:
            aenv_ray.sample("tau2", "null").run()
        assert "git clone" in str(raised.value.hint)
    assert cluster.sandboxes() == before


def test_a_task_that_needs_a_model_names_the_settings(cluster: Cluster) -> None:
    del cluster
    (episode,) = aenv_ray.sample("tau2", "null", [{"id": "retail:model:0"}], infra_retries=0)
    assert episode.reward is None
    assert "AENV_CHAT_MODEL_URL" in str(episode.error)


TALK = """
from aenv_ray.sampling import environment_tasks, select_tasks

async def talk(env, task):
    if ":model:" in task.id:
        for words in ("Hello?", "Anything else?"):
            await env.call_tool("tau2_send_message", {"message": words})
    for call in task.reference:
        await env.call_tool(call.tool, call.arguments)

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
tasks = select_tasks(environment_tasks("tau2"), ids=["retail:model:0", "retail:script:2"])
run = aenv_ray.sample("tau2", talk, tasks, runners="driver", concurrency=1)
say([[one.task_id, one.status, one.reward, str(one.error)] for one in run])
"""


@pytest.mark.timeout(400)  # its packages may have to be installed
def test_a_real_endpoint_plays_the_user_and_the_judge(
    alone: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the host's relay, with the key; the messages are as the API defines them."""
    answers = [
        completion("Please write d."),
        completion(None, finish_reason="length"),  # a reasoning model at its limit
        completion("It is urgent."),
        completion("No."),
        completion("Thank you. ###STOP###"),
        completion('```json\n{"met": true, "results": []}\n```'),
    ]
    with serving(*answers) as endpoint:
        monkeypatch.setenv("AENV_CHAT_MODEL_URL", endpoint.url)
        monkeypatch.setenv("AENV_CHAT_MODEL", "user-1")
        monkeypatch.setenv("AENV_CHAT_MODEL_KEY_ENV", "KEY_OF_THE_USER")
        monkeypatch.setenv("KEY_OF_THE_USER", "sk-user")
        played = alone(TALK).said()
    assert [row[1:3] for row in played] == [["completed", 1.0]] * 2, played
    assert {headers["Authorization"] for headers in endpoint.headers} == {"Bearer sk-user"}
    assert {sent["model"] for sent in endpoint.requests} == {"user-1"}
    messages = [message for sent in endpoint.requests for message in sent["messages"]]
    assert any(message["role"] == "assistant" for message in messages), "the user's own turns"
    assert [m for m in messages if None in m.values()] == []
    assert [sent.get("temperature") for sent in endpoint.requests[:3]] == [0.0, 0.0, None]
