"""tau2 runs by name: on a stand-in, or on the checkout of tau2-bench that AENV_TAU2 names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError, ToolNotFound
from aenv_ray.sampling import EpisodeStatus, Task, select_tasks
from aenv_ray.sampling.tasks.environment_tasks import environment_tasks
from tests.ray.cluster import Cluster

STAND_IN = Path(__file__).parents[2] / "fixtures" / "tau2_bench"
GIVEN = os.environ.get("AENV_TAU2")
TASKS_OF_THE_STAND_IN = 4


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AENV_TAU2", GIVEN or str(STAND_IN))
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
    pattern = "telecom:solo:*" if GIVEN else "mock:solo:*"
    tasks = list(select_tasks(environment_tasks("tau2"), ids=[pattern], limit=2))
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
