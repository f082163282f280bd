"""Which tasks of a source are sampled, and in which order."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.directories import TaskDirectories
from aenv_ray.trajectories.schema import Task


def select_tasks(
    tasks: Sequence[Task],
    *,
    ids: Sequence[str] = (),
    shuffle: int | None = None,
    limit: int | None = None,
) -> Sequence[Task]:
    """Return the tasks to sample: first filtered, then shuffled, then limited.

    Args:
        tasks: All tasks. Task directories are not read for this.
        ids: Ids or patterns such as ``count-*``; a task is kept if any of them matches. The id of a
            task is never a pattern. Empty keeps all.
        shuffle: Seed of the order; the same seed gives the same order. None keeps the order.
        limit: Maximum number of tasks; None: all.

    Raises:
        ConfigError: An id or pattern matches no task.
    """
    if isinstance(tasks, TaskDirectories):
        return tasks.of(_selected(tasks.entries, ids, shuffle, limit))
    return _selected(tasks, ids, shuffle, limit)


class _Identified(Protocol):
    @property
    def id(self) -> str:
        """Id of the task."""


_Entry = TypeVar("_Entry", bound=_Identified)


def _selected(
    tasks: Sequence[_Entry], ids: Sequence[str], shuffle: int | None, limit: int | None
) -> list[_Entry]:
    chosen = list(tasks)
    if ids:
        exact = {task.id for task in tasks}.intersection(ids)
        # Ids may contain brackets, as those of tau2-bench do: an id is not a pattern.
        patterns = [one for one in ids if one not in exact]
        for pattern in patterns:
            _expect_match(pattern, tasks)
        chosen = [
            task
            for task in tasks
            if task.id in exact or any(fnmatchcase(task.id, one) for one in patterns)
        ]
    if shuffle is not None:
        random.Random(shuffle).shuffle(chosen)
    return chosen[:limit]


def _expect_match(pattern: str, tasks: Sequence[_Identified]) -> None:
    if any(fnmatchcase(task.id, pattern) for task in tasks):
        return
    known = [task.id for task in tasks]
    close = difflib.get_close_matches(pattern, known, n=3) or known[:3]
    raise ConfigError(
        f"no task has the id {pattern!r}", hint=f"among {len(known)} tasks: {', '.join(close)}, …"
    )
