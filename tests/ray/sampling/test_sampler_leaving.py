"""Samplings that stream, resume and stop early: no episode is lost, and no sandbox remains."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, Sampling, Task
from aenv_ray.sampling.metrics import SamplingMetrics
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually_empty, without
from tests.ray.sampling.policies import probe_tasks, replay


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
        sampling = aenv_ray.sample(PROBE, act, probe_tasks(2), concurrency=2, out=out)
        async for episode in sampling:
            found.append(episode)
            lines = out.read_text().splitlines()
            assert [json.loads(line)["task_id"] for line in lines] == [e.task_id for e in found]
            quick_is_through.set()
        assert sampling.episodes == found[::-1]  # read from the file, in order of their index
        assert sampling._held == []
        return found

    episodes = asyncio.run(collect())
    assert [e.task_id for e in episodes] == ["t1", "t0"]
    assert [e.index for e in episodes] == [1, 0]
    lines = out.read_text().splitlines()
    assert [Episode.model_validate_json(line) for line in lines] == episodes


@pytest.mark.parametrize("source", [list, iter])
def test_an_interrupted_run_resumes_where_it_stopped(
    cluster: Cluster, tmp_path: Path, source: Callable[[Any], Any]
) -> None:
    """Finished episodes are kept, and neither repeated nor yielded again."""
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
def test_leaving_the_loop_releases_all_instances(cluster: Cluster, is_async: bool) -> None:
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
def test_endless_tasks_are_sampled_until_the_caller_stops(cluster: Cluster, is_async: bool) -> None:
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


def test_a_failing_task_source_ends_the_run_after_running_episodes(
    cluster: Cluster, tmp_path: Path
) -> None:
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


def test_the_loop_can_be_left_while_a_policy_hangs_in_a_thread(cluster: Cluster) -> None:
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


def test_an_exception_in_the_loop_releases_all_instances(cluster: Cluster) -> None:
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


def test_a_sampling_can_be_iterated_once(cluster: Cluster) -> None:
    """A second iteration is a mistake, said so."""
    del cluster

    async def act(env: Any, task: Task) -> None:
        del env, task

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(1))
    sampling.run()
    with pytest.raises(ConfigError, match="once"):
        sampling.run()


def test_a_run_without_tasks_has_no_episodes(cluster: Cluster) -> None:
    """An empty list is an empty summary."""
    del cluster
    summary = aenv_ray.sample(PROBE, replay("reference"), []).run()
    assert (summary.rollouts, summary.reward_mean) == (0, None)


def test_draining_finishes_the_running_episodes(cluster: Cluster) -> None:
    """What the first Ctrl-C of `aenv sample` does, also while the next task is awaited."""
    more = threading.Event()

    def tasks() -> Iterator[dict[str, str]]:
        yield {"id": "t0"}
        more.wait()

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    sampling = aenv_ray.sample(PROBE, act, tasks(), concurrency=2)
    for episode in sampling:
        assert episode.reward == 0.5
        sampling.drain()
    more.set()
    assert [episode.task_id for episode in sampling.episodes] == ["t0"]
    eventually_empty(cluster.sandboxes)


@pytest.mark.parametrize("is_drained", [False, True])
def test_the_left_metric_is_zero_after_a_run_ends_early(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_drained: bool
) -> None:
    """A trainer lives on, and so does the metric."""
    left: list[int] = []

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    monkeypatch.setattr(SamplingMetrics, "note_left", lambda _, count: left.append(count))
    sampling = aenv_ray.sample(PROBE, act, probe_tasks(9), concurrency=1, runners="driver")
    for _ in sampling:
        if not is_drained:
            break
        sampling.drain()
    assert sampling.finished < 9
    assert (left[0], left[-1]) == (9, 0)
    eventually_empty(cluster.sandboxes)
