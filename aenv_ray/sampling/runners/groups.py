"""The groups of a run: each task is played by several episodes, which start together."""

from __future__ import annotations

from collections.abc import Iterable

from aenv_ray.sampling.runners.assignments import Assignment, Group
from aenv_ray.sampling.tasks.feed import TaskFeed
from aenv_ray.trajectories.schema import Episode, Task


class GroupFeed:
    """Makes a group of each task. Sample `s` of task `n` is episode ``n * samples + s``.

    Args:
        tasks: The tasks.
        samples: Episodes of each task.
        extra: Further episodes of each task to start; the first `samples` that finish are kept.
    """

    def __init__(self, tasks: TaskFeed, samples: int, extra: int) -> None:
        self._tasks = tasks
        self.samples = samples
        """Episodes of each task."""
        self._extra = extra
        self._kept: set[int] = set()

    @property
    def group_size(self) -> int:
        """Episodes that are started for each task."""
        return self.samples + self._extra

    @property
    def total(self) -> int | None:
        """The number of episodes; None if the tasks have no length."""
        return None if self._tasks.total is None else self._tasks.total * self.samples

    @property
    def known(self) -> list[Task] | None:
        """The task of each episode; None if the tasks are not known yet."""
        known = self._tasks.known
        return None if known is None else [task for task in known for _ in range(self.samples)]

    @property
    def repeats_ids(self) -> bool:
        """Whether several tasks are known to have the same id."""
        ids = [task.id for task in self._tasks.known or ()]
        return len(ids) > len(set(ids))

    async def skip(self, kept: Iterable[Episode], where: str) -> None:
        """Skip episodes that an earlier run finished; a group may lack some of its samples.

        Raises:
            ConfigError: See `TaskFeed.skip`.
        """
        numbers: dict[int, str] = {}
        recorded: dict[int, Task] = {}
        for episode in kept:
            self._kept.add(episode.index)
            number = episode.index // self.samples
            numbers[number] = episode.task_id
            if episode.task is not None:
                recorded[number] = episode.task
        partly = {number for number in numbers if self._missing(number)}
        await self._tasks.skip(numbers, where, partly, recorded)

    def _missing(self, number: int) -> list[int]:
        first = number * self.samples
        return [n for n in range(first, first + self.samples) if n not in self._kept]

    async def take(self, most: int) -> list[Group]:
        """Return the next groups; none if there are no more, or the source of tasks failed.

        Args:
            most: Return up to this many, as soon as there is one; at least 1.
        """
        return [self._group(number, task) for number, task in await self._tasks.take(most)]

    def _group(self, number: int, task: Task) -> Group:
        if self.samples == 1:
            return Group((Assignment(number, task),), self._extra)
        first = number * self.samples
        members = [
            Assignment(index, task, group=str(number), sample=index - first)
            for index in self._missing(number)
        ]
        return Group(tuple(members), self._extra)

    @property
    def failure(self) -> Exception | None:
        """See `TaskFeed.failure`."""
        return self._tasks.failure

    def close(self) -> None:
        """See `TaskFeed.close`."""
        self._tasks.close()
