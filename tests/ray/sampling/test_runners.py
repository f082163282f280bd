"""Runners next to the sandboxes record the same episodes as the driver would, despite kills."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import EpisodeStatus, Task, loop_watch, sampler
from aenv_ray.testing.contract_bench import ENVIRONMENT
from aenv_ray.trajectories.shards import MANIFEST, Manifest
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually_empty
from tests.ray.sampling.policies import probe_tasks


async def _count(env: Any, task: Task) -> int:
    del task
    await env.call_tool("count")
    return os.getpid()


def _count_sync(env: Any, task: Task) -> int:
    del task
    env.call_tool("count")
    return os.getpid()


@pytest.mark.parametrize("policy", [_count, _count_sync], ids=["async", "sync"])
def test_episodes_are_played_in_another_process(
    cluster: Cluster, tmp_path: Path, policy: Any
) -> None:
    """With the same records, and nothing is left."""
    out = tmp_path / "episodes.jsonl"
    sampling = aenv_ray.sample(
        PROBE, policy, probe_tasks(24), concurrency=4, runners="nodes", near="me", out=out
    )
    summary = sampling.run()
    assert (summary.rollouts, summary.reward_mean, summary.tool_calls) == (24, 0.5, 24)
    assert sorted(episode.index for episode in sampling.episodes) == list(range(24))
    assert len({episode.instance_id for episode in sampling.episodes}) == 24
    assert os.getpid() not in {episode.output for episode in sampling.episodes}
    lines = [json.loads(line)["index"] for line in out.read_text().splitlines()]
    assert sorted(lines) == list(range(24))
    eventually_empty(cluster.sandboxes)


def test_a_killed_runner_costs_attempts_and_no_episode(cluster: Cluster, tmp_path: Path) -> None:
    """Its unfinished tasks are played again, its sandboxes are released, and nothing is doubled.

    No record is lost with it: this process writes them all.
    """
    killed = tmp_path / "killed"

    class Deadly:
        """Kills its runner in the middle of the run, once."""

        async def __call__(self, env: Any, task: Task) -> None:
            await env.call_tool("count")
            if task.id == "t5" and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "run"
    sampling = aenv_ray.sample(
        PROBE, Deadly, probe_tasks(16), concurrency=4, runners="nodes", out=out
    )
    summary = sampling.run()
    assert (summary.rollouts, summary.infra_failed, summary.reward_mean) == (16, 0, 0.5)
    assert sorted(episode.index for episode in sampling.episodes) == list(range(16))
    assert max(episode.attempts for episode in sampling.episodes) == 2
    manifest = Manifest.model_validate_json((out / MANIFEST).read_text())
    assert [(one.path, one.episodes) for one in manifest.shards] == [("driver-00000.jsonl", 16)]
    eventually_empty(cluster.sandboxes)


def test_a_task_that_always_ends_its_runner_voids_no_other(cluster: Cluster) -> None:
    """A policy that exits the process, or uses up its memory, at one task costs only that task."""

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")
        if task.id == "t5":
            os._exit(1)

    sampling = aenv_ray.sample(PROBE, act, probe_tasks(12), concurrency=4, runners="nodes")
    summary = sampling.run()
    void = [episode for episode in sampling.episodes if episode.reward is None]
    assert (summary.rollouts, summary.reward_mean) == (12, 0.5)
    assert [(one.task_id, one.status, one.attempts) for one in void] == [
        ("t5", EpisodeStatus.INFRA_FAILED, 3)
    ]
    eventually_empty(cluster.sandboxes)


def test_an_async_policy_that_blocks_the_driver_is_reported_while_it_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of time takes effect then, so nothing else would tell what the run waits for."""
    del cluster
    monkeypatch.setattr(loop_watch, "_MOST_S", 0.2)
    monkeypatch.setattr(sampler, "_LOOK_S", 0.05)
    is_reported = threading.Event()

    class Report(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "event loop of the episodes was blocked" in record.getMessage():
                is_reported.set()

    async def act(env: Any, task: Task) -> bool:
        del env, task
        return is_reported.wait(60.0)

    handler = Report()
    loop_watch.logger.addHandler(handler)
    try:
        (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1), runners="driver")
    finally:
        loop_watch.logger.removeHandler(handler)
    assert episode.output is True


def test_leaving_the_loop_ends_the_episodes_of_runners(cluster: Cluster) -> None:
    """What Ctrl-C does: sandboxes and runners end."""

    async def act(env: Any, task: Task) -> None:
        if task.id != "t0":
            await env.call_tool("hold", {"key": "never"})

    for episode in aenv_ray.sample(PROBE, act, probe_tasks(6), concurrency=3, runners="nodes"):
        assert episode.status is EpisodeStatus.COMPLETED
        break
    eventually_empty(cluster.sandboxes)


class _NeedsModule:
    """A policy that a runner cannot load."""

    def __call__(self, env: Any, task: Task) -> None:
        """Do nothing."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("no_such_module_on_the_runner",)


def test_a_policy_that_needs_a_missing_module_is_refused(cluster: Cluster) -> None:
    """The error names the module, and what to do."""
    del cluster
    sampling = aenv_ray.sample(PROBE, _NeedsModule(), probe_tasks(2), runners="nodes")
    with pytest.raises(ConfigError, match="no_such_module_on_the_runner") as caught:
        sampling.run()
    assert "install the module" in caught.value.hint


def test_a_policy_that_cannot_be_sent_is_refused_or_stays_in_the_driver(cluster: Cluster) -> None:
    """It runs in the driver unless the caller insists."""
    del cluster
    lock = threading.Lock()

    async def act(env: Any, task: Task) -> int:
        del env, task
        with lock:
            return os.getpid()

    with pytest.raises(ConfigError, match="cannot be pickled"):
        aenv_ray.sample(PROBE, act, probe_tasks(1), runners="nodes").run()
    (episode,) = aenv_ray.sample(PROBE, act, probe_tasks(1))
    assert episode.output == os.getpid()


@pytest.mark.parametrize("runners", ["driver", "nodes"])
def test_samples_of_a_task_form_a_group(cluster: Cluster, tmp_path: Path, runners: Any) -> None:
    """Each record names its group; a run that was interrupted in a group completes it."""
    del cluster
    out = tmp_path / "episodes.jsonl"

    def sampling(**options: Any) -> aenv_ray.Sampling:
        return aenv_ray.sample(
            PROBE, _count, probe_tasks(3), samples_per_task=4, runners=runners, out=out, **options
        )

    first = sampling()
    assert first.total == 12
    assert first.run().reward_mean == 0.5
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:7]))
    again = sampling(resume=True)
    assert again.run().rollouts == 12
    assert again.kept == 7
    for run in (first, again):
        samples = {(e.index, e.task_id, e.group, e.sample) for e in run.episodes}
        assert samples == {(n, f"t{n // 4}", str(n // 4), n % 4) for n in range(12)}


def test_instances_of_an_environment_with_a_reset_are_reused(cluster: Cluster) -> None:
    """Each episode finds an empty basket, its own task and its own seed."""

    async def put(env: Any, task: Task) -> list[Any]:
        basket = await env.call_tool("put", {"item": task.id})
        seen = (await env.call_tool("episode")).data
        await env.exec("echo x > left; setsid sleep 600 >/dev/null 2>&1 &")
        return [basket.data, seen["task"]["id"], seen["current_seed"]]

    tasks = [{"id": f"t{n}", "seed": n, "reward": None} for n in range(12)]
    sampling = aenv_ray.sample(ENVIRONMENT, put, tasks, concurrency=2)
    assert sampling.run().rollouts == 12
    for episode in sampling.episodes:
        n = episode.seed
        assert episode.output == [[f"t{n}"], f"t{n}", n]
    assert len({episode.instance_id for episode in sampling.episodes}) <= 4
    assert sum(episode.start_mode == "reset" for episode in sampling.episodes) >= 8
    eventually_empty(cluster.sandboxes)
