"""Groups: which episodes a task gets, and which of them are kept."""

from __future__ import annotations

import asyncio

from aenv_ray.sampling import Episode, EpisodeStatus, Task
from aenv_ray.sampling.runners.assignments import Assignment, Group, GroupRun
from aenv_ray.sampling.runners.groups import GroupFeed
from aenv_ray.sampling.runners.instance_source import GroupStart
from aenv_ray.sampling.runners.local_runner import RunnerQueue
from aenv_ray.sampling.tasks.feed import TaskFeed


def _episode(index: int, status: EpisodeStatus = EpisodeStatus.COMPLETED) -> Episode:
    return Episode(index=index, task_id="t", status=status, reward=None)


def _group(*indices: int, extra: int = 0) -> Group:
    task = Task(id="t")
    members = tuple(Assignment(i, task, group="0", sample=n) for n, i in enumerate(indices))
    return Group(members, extra)


def _feed(tasks: int, samples: int) -> GroupFeed:
    return GroupFeed(TaskFeed([{"id": f"t{n}"} for n in range(tasks)]), samples, 0)


async def test_each_task_has_a_group_of_samples() -> None:
    """Numbered through, so that a record says which it is."""
    feed = _feed(2, 3)
    assert feed.total == 6
    members = [one for group in await feed.take(2) for one in group.members]
    assert [(one.index, one.task.id, one.group, one.sample) for one in members] == [
        (0, "t0", "0", 0), (1, "t0", "0", 1), (2, "t0", "0", 2),
        (3, "t1", "1", 0), (4, "t1", "1", 1), (5, "t1", "1", 2),
    ]  # fmt: skip
    assert await feed.take(2) == []


async def test_resuming_plays_the_missing_samples() -> None:
    """A group that was interrupted keeps what it has."""
    feed = _feed(3, 2)
    kept = [_episode(i).model_copy(update={"task_id": f"t{i // 2}"}) for i in (0, 1, 3)]
    await feed.skip(kept, "episodes.jsonl")
    groups = await feed.take(3) + await feed.take(3)
    assert [[one.index for one in group.members] for group in groups] == [[2], [4, 5]]


def test_the_first_samples_to_finish_are_kept() -> None:
    """Hedging: an extra episode takes the place of a slow one."""
    run = GroupRun(_group(4, 5, extra=1))
    (first,) = run.finish(_episode(-1))
    assert (first.index, first.sample) == (4, 0)
    (second,) = run.finish(_episode(5))
    assert second.index == 5
    assert run.is_complete
    assert run.finish(_episode(4)) == []


def test_an_infrastructure_failure_is_kept_only_if_too_few_samples_finish() -> None:
    """A group of three with one extra can lose one, and not two."""
    run, failed = GroupRun(_group(0, 1, 2, extra=1)), EpisodeStatus.INFRA_FAILED
    assert run.finish(_episode(0, failed)) == []
    (void,) = run.finish(_episode(1, failed))
    assert void.status is failed
    kept = run.finish(_episode(2)) + run.finish(_episode(-1))
    assert sorted(one.index for one in [void, *kept]) == [0, 1, 2]


async def test_the_others_are_cancelled_once_enough_have_finished() -> None:
    """They occupy their instances no longer."""
    cancelled: list[int] = []

    async def play(one: Assignment, start: GroupStart) -> Episode:
        del start
        if one.index != 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(one.index)
                raise
        await asyncio.sleep(0)  # the others begin
        return _episode(one.index)

    queue = RunnerQueue(play)
    await queue.give([_group(1, extra=2)], 8, has_more=False)
    assert [one.index for one in await queue.finished()] == [1]
    await queue.close()
    assert sorted(cancelled) == [-2, -1]
