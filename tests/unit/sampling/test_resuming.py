"""A resumed run is the run that it continues: other tasks, policies or groups are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.policies.base import name_of
from aenv_ray.sampling.resuming import digests_of, warn_if_changed
from aenv_ray.sampling.runners.groups import GroupFeed
from aenv_ray.sampling.tasks.feed import TaskFeed
from aenv_ray.trajectories.reading import finished_episodes
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task, recordable_task
from aenv_ray.trajectories.shards import open_output

TASKS: list[dict[str, Any]] = [
    {
        "id": f"t{n}",
        "instruction": "count \ud800",  # which no record can hold
        "setup": {"name": "fill", "arguments": {"size": 1.0, "names": ("a", 3), "when": {1}}},
        "reward": {"name": "score"},
        "data": object(),
    }
    for n in range(4)
]


async def act(env: Any, task: Task) -> None:
    """Do nothing."""


async def other(env: Any, task: Task) -> None:
    """Do nothing else."""


def _recorded(out: Path, samples: int = 1, count: int = 3, **fields: Any) -> None:
    """Write the episodes of an interrupted run."""
    output = open_output(out)
    for index in range(count):
        number, sample = divmod(index, samples)
        given: dict[str, Any] = {
            "task_id": f"t{number}",
            "task": recordable_task(Task.model_validate(TASKS[number])),
            "status": EpisodeStatus.COMPLETED,
            "reward": 1.0,
            "policy": name_of(act),
            "environment_digest": "1" * 64,
            "group": str(number) if samples > 1 else None,
            "sample": sample if samples > 1 else None,
        }
        output.write(Episode.model_validate({"index": index} | given | fields))
    output.close()
    assert output.failure is None


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
@pytest.mark.parametrize("source", [list, iter])
def test_the_same_run_is_resumed(
    source: Callable[[Any], Any], name: str, samples: int, tmp_path: Path
) -> None:
    _recorded(tmp_path / name, samples)
    run = aenv_ray.sample(
        "mini-terminal", act, source(TASKS), samples_per_task=samples, out=tmp_path / name,
        resume=True,
    )  # fmt: skip
    assert run.kept == 3
    feed = GroupFeed(TaskFeed(source(TASKS)), samples, 0)
    asyncio.run(feed.skip(finished_episodes(tmp_path / name, None), name))


def test_records_of_older_versions_are_resumed(tmp_path: Path) -> None:
    _recorded(tmp_path / "run.jsonl", task=None, policy=None, environment_digest=None)
    assert aenv_ray.sample(
        "mini-terminal", act, TASKS, out=tmp_path / "run.jsonl", resume=True
    ).kept == 3  # fmt: skip


def test_another_policy_is_refused(tmp_path: Path) -> None:
    """One summary would mix both."""
    out = tmp_path / "run.jsonl"
    _recorded(out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r":act'.*:other'"):
        aenv_ray.sample("mini-terminal", other, TASKS, out=out, resume=True)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("before", "now", "count"), [(1, 2, 2), (2, 1, 1), (2, 4, 3), (4, 2, 3)])
def test_another_number_of_samples_is_refused(
    before: int, now: int, count: int, tmp_path: Path
) -> None:
    """Indices would be those of other tasks, or records would lack their group."""
    out = tmp_path / "run.jsonl"
    tasks = [{"id": "t0"}] * 4
    _recorded(out, before, count, task_id="t0", task=None)
    with pytest.raises(ConfigError, match=f"with another samples_per_task than {now}"):
        aenv_ray.sample("mini-terminal", act, tasks, samples_per_task=now, out=out, resume=True)


@pytest.mark.parametrize("source", [list, iter])
@pytest.mark.parametrize("field", ["instruction", "setup", "reward", "submission"])
def test_a_task_with_another_content_is_refused(
    field: str, source: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Its id is the same, and so its episodes would count as samples of the same task."""
    out = tmp_path / "run.jsonl"
    _recorded(out)
    value = "count twice" if field == "instruction" else {"name": "new"}
    changed = [TASKS[0], TASKS[1] | {field: value}, *TASKS[2:]]
    with pytest.raises(ConfigError, match=f"run.jsonl has episodes of task 't1' .* {field}: "):
        aenv_ray.sample("mini-terminal", act, source(changed), out=out, resume=True).run()


@pytest.mark.parametrize("source", [list, iter])
def test_tasks_are_the_same_wherever_their_files_are(
    source: Callable[[Any], Any], tmp_path: Path
) -> None:
    """The directory of a benchmark is mounted at another path in the next job."""

    def tasks(place: str, timeout_s: float) -> list[dict[str, Any]]:
        call = {"archives": {"tests": (f"{place}/tests",)}, "timeout_s": timeout_s}
        return [one | {"setup": call, "reward": call, "submission": call} for one in TASKS]

    recorded = Task.model_validate(tasks("/a", 60.0)[0])
    _recorded(tmp_path / "run.jsonl", count=1, task=recordable_task(recorded))
    moved = source(tasks("/b", 90.0))
    run = aenv_ray.sample("mini-terminal", act, moved, out=tmp_path / "run.jsonl", resume=True)
    assert run.kept == 1
    feed = GroupFeed(TaskFeed(source(tasks("/b", 90.0))), 1, 0)
    asyncio.run(feed.skip(finished_episodes(tmp_path / "run.jsonl", None), "run.jsonl"))


@pytest.mark.parametrize(
    ("field", "before", "now"),
    [
        ("instruction", f"{'x' * 200} red {'y' * 200}", f"{'x' * 200} blue {'y' * 200}"),
        (
            "reward",
            {"arguments": {"script": "x" * 200, "z": "red"}},
            {"arguments": {"z": "blue", "script": "x" * 200}},
        ),
    ],
)
def test_the_error_shows_where_tasks_differ(
    field: str, before: Any, now: Any, tmp_path: Path
) -> None:
    """Most instructions of a benchmark begin alike."""
    earlier = Task.model_validate({"id": "t0", field: before})
    _recorded(tmp_path / "run.jsonl", count=1, task=earlier)
    with pytest.raises(ConfigError, match=f"another {field}: .*red.* but .*blue") as caught:
        aenv_ray.sample(
            "mini-terminal", act, [{"id": "t0", field: now}], out=tmp_path / "run.jsonl",
            resume=True,
        ).run()  # fmt: skip
    assert len(caught.value.message) < 500


def test_another_environment_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its digest also changes with a note in the project, so the run is not refused."""
    _recorded(tmp_path / "run.jsonl", count=3)
    kept = digests_of(finished_episodes(tmp_path / "run.jsonl", None))
    with caplog.at_level(logging.WARNING):
        warn_if_changed(kept, "1" * 64, "./todo")
        assert caplog.messages == []
        warn_if_changed(kept, "2" * 64, "./todo")
    (message,) = caplog.messages
    assert f"3 of the episodes that are kept: their environment_digest is {'1' * 64}" in message
    assert "2" * 64 in message
