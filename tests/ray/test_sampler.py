"""The sampler: honest books, whatever fails; and nothing left, however it is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray import project as projects
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus, Sampling, Task, load_tasks, time_limit
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually_empty, kill, without

MINI = "mini-terminal@1.0.0"


@pytest.fixture
def mini_tasks(cluster: Cluster) -> list[Task]:
    del cluster
    return load_tasks(projects.resolve(MINI).path / "tasks.jsonl")[:8]


def replay(script: str) -> Any:
    """Return an async policy that replays a task's script."""

    async def act(env: Any, task: Task) -> str:
        for step in getattr(task, script):
            await env.call_tool(step.tool, step.arguments)
        return script

    return act


def replay_sync(script: str) -> Any:
    """Return a sync policy that replays a task's script."""

    def act(env: Any, task: Task) -> str:
        for step in getattr(task, script):
            env.call_tool(step.tool, step.arguments)
        return script

    return act


def probe_tasks(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return tasks of the probe project."""
    return [{"id": f"t{n}", **fields} for n in range(count)]


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
        assert [s.tool for s in episode.steps] == ["execute_command"] * len(episode.steps)


def test_a_dedicated_density_samples_too(mini_tasks: list[Task]) -> None:
    """Design D2: the same books at either density."""
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


# --- what fails ----------------------------------------------------------------------------------


def test_an_infrastructure_failure_is_never_a_reward(cluster: Cluster) -> None:
    """Invariant 2: a sandbox that dies every time is void after bounded retries, and in no mean."""
    seen: list[str] = []

    async def act(env: Any, task: Task) -> None:
        if task.id == "t1":
            seen.append(env.instance_id)
            await env.call_tool("leave", {"code": 9})
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
def test_a_failure_that_the_policy_swallows_is_no_reward(cluster: Cluster, is_async: bool) -> None:
    """Invariant 2: also when the policy catches everything and goes on."""

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
        infra_retries=0,
    )
    (episode,) = list(sampling)
    assert (episode.status, episode.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert sampling.summary().reward_mean is None


def test_a_transient_failure_is_retried(cluster: Cluster) -> None:
    """A sandbox that is killed once costs an attempt, not the episode; its steps start anew."""
    killed: list[int] = []

    async def act(env: Any, task: Task) -> None:
        del task
        await env.call_tool("count")
        if not killed:
            killed.extend(cluster.sandboxes())
            for pid in killed:
                kill(pid)
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
    """`policy_failed`, no retry, no reward; the other episodes go on."""
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


@pytest.mark.parametrize("name", ["raising", "not-a-number", "wordy", "nonsense"])
def test_a_reward_that_is_none_is_void(cluster: Cluster, name: str) -> None:
    """Raising, NaN, no number, no such reward: `reward_failed`, never a made-up number."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        del env, task

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(1, reward={"name": name}))
    summary = sampling.run()
    assert (summary.reward_failed, summary.reward_mean, summary.succeeded) == (1, None, 0)
    assert sampling.episodes[0].reward is None


def test_a_setup_that_fails_is_void(cluster: Cluster) -> None:
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
def test_a_policy_that_hangs_is_void_at_its_limit(cluster: Cluster, is_async: bool) -> None:
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
    assert str(late.error).startswith("deadline_exceeded: the policy had not ended after 2 s")
    assert (sampling.summary().timed_out, sampling.summary().reward_mean) == (1, None)
    hangs_on.set()
    eventually_empty(cluster.sandboxes)


def test_a_policy_acts_no_longer_than_its_instance_lives(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: without a limit of its own the episode of a hanging policy ends with it."""
    del cluster
    monkeypatch.setattr(time_limit, "ASK_S", 0.1)

    async def act(env: Any, task: Task) -> None:
        await asyncio.Event().wait()

    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1), ttl="2s", infra_retries=0)
    assert (episode.status, episode.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert str(episode.error).startswith("instance_expired: ")


# --- streaming, files, leaving -------------------------------------------------------------------


def test_episodes_stream_as_they_finish_and_each_is_one_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The quick one comes before the slow one that began first; the file has it by then."""
    del cluster
    out = tmp_path / "episodes.jsonl"
    quick_is_through = asyncio.Event()

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")
        if task.id == "t0":
            await quick_is_through.wait()

    async def collect() -> list[Episode]:
        found = []
        async for episode in aenv_ray.sample(PROBE, act, probe_tasks(2), concurrency=2, out=out):
            found.append(episode)
            lines = out.read_text().splitlines()
            assert [json.loads(line)["task_id"] for line in lines] == [e.task_id for e in found]
            quick_is_through.set()
        return found

    episodes = asyncio.run(collect())
    assert [e.task_id for e in episodes] == ["t1", "t0"]
    assert [e.index for e in episodes] == [1, 0]
    lines = out.read_text().splitlines()
    assert [Episode.model_validate_json(line) for line in lines] == episodes


@pytest.mark.parametrize("source", [list, iter])
def test_an_interrupted_run_goes_on_where_it_was(
    cluster: Cluster, tmp_path: Path, source: Callable[[Any], Any]
) -> None:
    """What it had finished is kept, and neither run nor given again."""
    del cluster
    out = tmp_path / "episodes.jsonl"
    ran: list[str] = []

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")
        ran.append(task.id)

    def sampling() -> Sampling:
        tasks = source(probe_tasks(3))
        return aenv_ray.sample(PROBE, act, tasks, concurrency=1, out=out, resume=True)

    interrupted = sampling()
    for episode in interrupted:
        assert episode.index == 0
        break
    finished = len(interrupted.episodes)
    ran.clear()
    rest = sampling()
    assert (rest.kept, rest.total) == (finished, 3 if source is list else None)
    assert [episode.index for episode in rest] == list(range(3))[finished:]
    assert ran == ["t0", "t1", "t2"][finished:]
    assert rest.summary().rollouts == 3
    assert len(out.read_text().splitlines()) == 3
    assert list(sampling()) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_leaving_the_loop_releases_everything(cluster: Cluster, is_async: bool) -> None:
    """After a `break` no instance lives and no episode runs on."""

    async def act(env: Any, task: Task) -> None:
        if task.id != "t0":
            await env.call_tool("hold", {"key": "never"})

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(12), concurrency=6)
    if is_async:

        async def first() -> str:
            stream = sampling.__aiter__()
            episode = await anext(stream)
            await stream.aclose()
            return episode.task_id

        assert asyncio.run(first()) == "t0"
    else:
        for episode in sampling:
            assert episode.task_id == "t0"
            break
    eventually_empty(cluster.sandboxes)
    assert len(sampling.episodes) == 1


@pytest.mark.parametrize("is_async", [True, False])
def test_tasks_without_an_end_are_sampled_until_one_leaves(
    cluster: Cluster, is_async: bool
) -> None:
    """No more tasks are read than there are episodes, and nothing stays."""
    read: list[int] = []

    def endless() -> Iterator[dict[str, str]]:
        for n in itertools.count():
            read.append(n)
            yield {"id": f"t{n}"}

    async def endless_async() -> AsyncIterator[dict[str, str]]:
        for task in endless():
            yield task

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    tasks = endless_async() if is_async else endless()
    sampling = aenv_ray.sample(PROBE, act, tasks, concurrency=2)
    assert sampling.total is None
    for episode in sampling:
        assert len(read) <= len(sampling.episodes) + 2
        if episode.index == 4:
            break
    eventually_empty(cluster.sandboxes)


def test_tasks_that_fail_end_the_run_after_what_runs(cluster: Cluster, tmp_path: Path) -> None:
    """What the iterator raises is raised, once every episode that had begun is there."""
    del cluster
    out = tmp_path / "episodes.jsonl"

    def broken() -> Iterator[dict[str, str]]:
        yield from probe_tasks(2)
        raise OSError("the data set is gone")

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    sampling = aenv_ray.sample(PROBE, act, broken(), concurrency=3, out=out)
    with pytest.raises(OSError, match="the data set is gone"):
        sampling.run()
    assert sorted(episode.task_id for episode in sampling.episodes) == ["t0", "t1"]
    assert sampling.summary().reward_mean == 0.5
    assert len(out.read_text().splitlines()) == 2


def test_leaving_a_policy_that_hangs_in_a_thread(cluster: Cluster) -> None:
    """What Ctrl-C does: the thread cannot be stopped, but is not waited for either."""
    hangs_on = threading.Event()

    def act(env: Any, task: Task) -> None:
        env.call_tool("count")
        if task.id != "t0":
            hangs_on.wait()

    for episode in aenv_ray.sample(PROBE, act, probe_tasks(3), concurrency=3):
        assert episode.task_id == "t0"
        break
    hangs_on.set()
    eventually_empty(cluster.sandboxes)


def test_an_exception_in_the_loop_releases_everything(cluster: Cluster) -> None:
    """The caller's own exception passes, and nothing stays."""

    async def act(env: Any, task: Task) -> None:
        if task.id != "t0":
            await env.call_tool("hold", {"key": "never"})

    def consume() -> None:
        for _ in aenv_ray.sample(PROBE, act, probe_tasks(6), concurrency=3):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        consume()
    eventually_empty(lambda: without(cluster.sandboxes(), []))


def test_a_sampling_runs_once(cluster: Cluster) -> None:
    """A second iteration is a mistake, said so."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        del env, task

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(1))
    sampling.run()
    with pytest.raises(ConfigError, match="once"):
        sampling.run()


def test_no_tasks_are_no_episodes(cluster: Cluster) -> None:
    """An empty list is an empty summary."""
    del cluster
    summary = aenv_ray.sample(PROBE, replay("reference"), []).run()
    assert (summary.rollouts, summary.reward_mean) == (0, None)
