"""The sampler records each episode truthfully, whichever part fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray import logs
from aenv_ray.config import Settings
from aenv_ray.project.project import resolve
from aenv_ray.sampling import EpisodeStatus, Task, user_code
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually_empty
from tests.ray.sampling.policies import MINI, mini_tasks, probe_tasks, replay, replay_sync

__all__ = ["mini_tasks"]  # a fixture


@pytest.mark.parametrize(("script", "mean"), [("reference", 1.0), ("wrong", 0.0)])
@pytest.mark.parametrize("form", [replay, replay_sync], ids=["async", "sync"])
def test_scripted_policies_get_their_reward(
    mini_tasks: list[Task], form: Callable[[str], Any], script: str, mean: float
) -> None:
    """The reference solves every task, the wrong script none, in sync and in async policies."""
    sampling = aenv_ray.sample(MINI, form(script), mini_tasks, concurrency=4)
    summary = sampling.run()
    assert summary.reward_mean == mean
    assert (summary.rollouts, summary.succeeded) == (8, 8 if mean else 0)
    assert summary.infra_failed == summary.policy_failed == summary.reward_failed == 0
    assert summary.tool_calls == sum(len(getattr(t, script)) for t in mini_tasks)
    for episode in sampling.episodes:
        assert episode.status is EpisodeStatus.COMPLETED
        assert episode.output == script
        assert episode.instance_id is not None
        assert episode.environment_digest == resolve(episode.environment or "").digest
        assert [s.tool for s in episode.steps] == ["execute_command"] * len(episode.steps)


def test_sampling_works_with_dedicated_density(mini_tasks: list[Task]) -> None:
    """The same books at either density."""
    summary = aenv_ray.sample(
        MINI, replay("reference"), mini_tasks[:2], concurrency=2, actor="dedicated"
    ).run()
    assert (summary.rollouts, summary.reward_mean) == (2, 1.0)


def test_an_episode_records_its_steps(cluster: Cluster) -> None:
    """Tool, arguments, what the policy saw, and errors that were no results."""
    del cluster

    async def act(env: Any, task: Task) -> dict[str, str]:
        assert {t["name"] for t in await env.list_tools()} >= {"add", "echo"}
        await env.call_tool("add", {"a": 1})
        await env.call_tool("fail", {"text": "alas"})
        with pytest.raises(aenv_ray.AenvError):
            await env.call_tool("nonsense")
        await env.write_file("x", "1")
        assert (await env.exec("cat x")).text() == "1"
        return {"task": task.id}

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1, reward={"arguments": {"value": 0.25}}))
    assert (episode.reward, episode.reward_detail) == (0.25, {"score": 0.25})
    assert episode.output == {"task": "t0"}
    added, failed, refused = episode.steps
    assert (added.tool, added.arguments, added.text, added.is_error) == (
        "add",
        {"a": 1},
        "2",
        False,
    )
    assert failed.is_error
    assert failed.error is None
    assert "alas" in failed.text
    assert (refused.is_error, refused.error) == (True, "tool_not_found")


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`AENV_LOG_FORMAT=json`; the loggers are as before afterwards."""
    monkeypatch.setattr(logs, "settings", lambda: Settings(log_format="json"))
    ours = logging.getLogger("aenv_ray")
    before = ours.handlers, ours.level, ours.propagate, logs.events.level
    yield
    ours.handlers, ours.level, ours.propagate, logs.events.level = before


def test_log_lines_name_episode_task_instance_and_owner(
    cluster: Cluster, as_json: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that other code logs during the episode, and if the driver plays it."""
    del cluster, as_json

    async def act(env: Any, task: Task) -> None:
        del env
        logging.getLogger("aenv_ray.a_policy").warning("thinking")

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1), runners="driver", owner="ann")
    written = capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in written if line.startswith("{")]
    about = {"component": "runner", "episode": 0, "task": "t0", "owner": "ann"}
    about |= {"instance": episode.instance_id}
    (thought,) = [line for line in lines if line["message"] == "thinking"]
    (ended,) = [line for line in lines if line["message"] == "episode 0, attempt 1: completed"]
    assert thought == thought | about
    assert ended == ended | about


# --- what fails ----------------------------------------------------------------------------------


def test_an_infrastructure_failure_is_never_a_reward(cluster: Cluster) -> None:
    """Invariant 2: a sandbox that is killed every time is void after some retries."""
    seen: list[str] = []

    async def act(env: Any, task: Task) -> None:
        if task.id == "t1":
            seen.append(env.instance_id)
            signal_all(cluster.sandboxes())
        await env.call_tool("count")

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(3), concurrency=1, infra_retries=2)
    summary = sampling.run()
    void = next(e for e in sampling.episodes if e.task_id == "t1")
    assert (void.status, void.reward, void.attempts) == (EpisodeStatus.INFRA_FAILED, None, 3)
    assert str(void.error).startswith("sandbox_lost: ")
    assert len(set(seen)) == 3, "each attempt has a fresh instance"
    assert (summary.infra_failed, summary.reward_mean, summary.rollouts) == (1, 0.5, 3)
    assert cluster.sandboxes() == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_death_from_inside_is_an_outcome(cluster: Cluster, is_async: bool) -> None:
    """Invariant 14: even if the policy catches every exception and continues."""

    async def careless(env: Any, task: Task) -> str:
        del task
        with contextlib.suppress(Exception):
            await env.call_tool("leave", {"code": 9})
        return "done"

    def careless_sync(env: Any, task: Task) -> str:
        del task
        with contextlib.suppress(Exception):
            env.call_tool("leave", {"code": 9})
        return "done"

    sampling = aenv_ray.sample(
        PROBE,
        careless if is_async else careless_sync,
        probe_tasks(1),
        reward_on_death=-1.0,
    )
    (episode,) = list(sampling)
    assert (episode.status, episode.reward) == (EpisodeStatus.DIED_INSIDE, -1.0)
    assert episode.attempts == 1
    assert str(episode.error).startswith("sandbox_died_inside: ")
    assert (episode.steps[-1].tool, episode.steps[-1].error) == ("leave", "sandbox_died_inside")
    assert (sampling.summary().died_inside, sampling.summary().reward_mean) == (1, -1.0)


def test_a_transient_failure_is_retried(cluster: Cluster) -> None:
    """A sandbox that is killed once costs an attempt, not the episode, which starts over."""
    killed: list[int] = []

    async def act(env: Any, task: Task) -> None:
        del task
        await env.call_tool("count")
        if not killed:
            killed.extend(cluster.sandboxes())
            signal_all(killed)
        await env.call_tool("count")

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1), concurrency=1)
    assert (episode.status, episode.reward, episode.attempts) == ("completed", 0.5, 2)
    assert [s.text for s in episode.steps] == ["1", "2"]


def test_a_project_that_does_not_load_voids_every_episode(
    cluster: Cluster, project: Callable[..., Path]
) -> None:
    """An instance that cannot start is infrastructure: recorded with its reason, no mean."""
    del cluster
    path = project("raise RuntimeError('not today')\n")
    summary = aenv_ray.sample(path, replay("reference"), probe_tasks(2), infra_retries=0).run()
    assert (summary.infra_failed, summary.reward_mean) == (2, None)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_policy_that_raises_is_its_own_failure(cluster: Cluster, is_async: bool) -> None:
    """`policy_failed`, no retry, no reward; the other episodes continue."""
    del cluster
    calls: list[str] = []

    def act(env: Any, task: Task) -> None:
        del env
        calls.append(task.id)
        if task.id == "t0":
            raise KeyError("the model spoke in tongues")

    async def aact(env: Any, task: Task) -> None:
        act(env, task)

    sampling = aenv_ray.sample(PROBE, aact if is_async else act, probe_tasks(3))
    summary = sampling.run()
    assert sorted(calls) == ["t0", "t1", "t2"]
    assert (summary.policy_failed, summary.reward_mean, summary.infra_failed) == (1, 0.5, 0)
    failed = next(e for e in sampling.episodes if e.task_id == "t0")
    assert (failed.status, failed.reward) == (EpisodeStatus.POLICY_FAILED, None)
    assert "the model spoke in tongues" in str(failed.error)
    assert str(failed.error).endswith("in act)")


@pytest.mark.parametrize("name", ["raising", "not-a-number", "wordy", "nonsense"])
def test_an_invalid_reward_is_void(cluster: Cluster, name: str) -> None:
    """Raising, NaN, no number, no such reward: `reward_failed`, never a made-up number."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        del env, task

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(1, reward={"name": name}))
    summary = sampling.run()
    assert (summary.reward_failed, summary.reward_mean, summary.succeeded) == (1, None, 0)
    assert sampling.episodes[0].reward is None


def test_a_failed_setup_voids_the_episode(cluster: Cluster) -> None:
    """A task that cannot be prepared says nothing about the policy, which does not act."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        raise AssertionError("not reached")

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1, setup={"function": "burst"}))
    assert episode.status is EpisodeStatus.REWARD_FAILED
    assert "the function burst" in str(episode.error)


def test_a_task_without_reward_completes(cluster: Cluster) -> None:
    """`reward: null` leaves the episode without one."""
    del cluster

    async def act(env: Any, task: Task) -> object:
        del env, task
        return object()

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(1, reward=None))
    assert sampling.run().reward_mean is None
    assert sampling.episodes[0].status is EpisodeStatus.COMPLETED
    assert "object object" in sampling.episodes[0].output


@pytest.mark.parametrize("is_async", [True, False])
def test_a_hanging_policy_is_void_at_its_limit(cluster: Cluster, is_async: bool) -> None:
    """`timed_out`: typed, in no mean, not tried again; and its instance is released."""
    hangs_on = threading.Event()

    def act(env: Any, task: Task) -> None:
        hangs_on.wait()

    async def aact(env: Any, task: Task) -> None:
        await asyncio.Event().wait()

    sampling = aenv_ray.sample(
        PROBE, aact if is_async else act, probe_tasks(1), episode_timeout="2s"
    )
    (late,) = sampling
    assert (late.status, late.reward, late.attempts) == (EpisodeStatus.TIMED_OUT, None, 1)
    assert str(late.error).startswith("deadline_exceeded: the policy did not end within 2 s")
    assert (sampling.summary().timed_out, sampling.summary().reward_mean) == (1, None)
    hangs_on.set()
    eventually_empty(cluster.sandboxes)


def test_a_policy_acts_no_longer_than_its_instance_lives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: without a limit, the episode of a hanging policy ends with its instance."""
    del cluster
    monkeypatch.setattr(user_code, "CHECK_S", 0.1)

    async def act(env: Any, task: Task) -> None:
        await asyncio.Event().wait()

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1), ttl="2s")
    assert (episode.status, episode.reward) == (EpisodeStatus.TIMED_OUT, None)
    assert episode.attempts == 1, "an agent that waits for its TTL gets no second attempt"
    assert str(episode.error).startswith("instance_expired: ")
