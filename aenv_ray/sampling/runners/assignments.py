"""Decides which runner plays which tasks, and hands the tasks of a lost runner out again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task to play."""

    index: int
    task: Task
    attempt: int = 1
    """Number of the attempt; more than 1 if runners were lost with the task."""
    group: str | None = None
    """Id of the group in records; None if each task has one sample."""
    sample: int | None = None
    """Number in the group."""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one task, which start together or not at all, on one runner."""

    members: tuple[Assignment, ...]
    extra: int = 0
    """Further samples to start; the first to finish are kept, one for each member."""

    @property
    def size(self) -> int:
        """Number of episodes to start."""
        return len(self.members) + self.extra


class GroupRun:
    """A group that is being played: which of its episodes are kept.

    An episode that failed for infrastructure is kept only if too few others are left.
    """

    def __init__(self, group: Group) -> None:
        self._slots = {one.index: one for one in group.members}
        self._left = group.size
        self._failed: list[Episode] = []

    @property
    def is_complete(self) -> bool:
        """Whether no further episode is kept."""
        return not self._slots

    def finish(self, episode: Episode) -> list[Episode]:
        """Note that an episode has finished; return those that are known to be kept from now on."""
        self._left -= 1
        if not self._slots:
            return []
        kept: list[Episode] = []
        if episode.status is EpisodeStatus.INFRA_FAILED:
            self._failed.append(episode)
        else:
            kept.append(self._placed(episode))
        while self._failed and self._left < len(self._slots):
            kept.append(self._placed(self._failed.pop()))
        return kept

    def _placed(self, episode: Episode) -> Episode:
        """Return an episode as that of a member: its own, if it has not been replaced."""
        slot = self._slots.pop(episode.index, None)
        if slot is not None:
            return episode
        slot = self._slots.pop(min(self._slots))
        return episode.model_copy(update={"index": slot.index, "sample": slot.sample})


class Assignments:
    """The tasks that are being played: each is reported once, whatever happens to its runners.

    Args:
        most_attempts: How often to try one task; a task that was lost that often is not handed out
            again.
    """

    def __init__(self, most_attempts: int) -> None:
        self._most_attempts = most_attempts
        self._given: dict[str, dict[int, Assignment]] = {}
        self._extras: Counter[str] = Counter()
        """By runner: the extra samples of its unfinished groups."""
        self._groups: dict[int, Group] = {}
        self.returned: deque[Group] = deque()
        """Groups of lost and slow runners, to be handed out before others."""

    def give(self, runner: str, group: Group) -> None:
        """Note that a runner plays a group."""
        given = self._given.setdefault(runner, {})
        for one in group.members:
            given[one.index] = one
            self._groups[one.index] = group
        self._extras[runner] += group.extra

    def count(self, runner: str) -> int:
        """Return how many episodes a runner has, with all extra samples of unfinished groups."""
        return len(self._given.get(runner, ())) + self._extras[runner]

    @property
    def is_empty(self) -> bool:
        """Whether every task that was given out is finished."""
        return not self._groups and not self.returned

    def finish(self, runner: str, index: int) -> bool:
        """Note that a runner has played a task; False if it is not that runner's any more."""
        given = self._given.get(runner, {})
        if given.pop(index, None) is None:
            return False
        group = self._groups.pop(index)
        if not any(one.index in given for one in group.members):
            self._extras[runner] -= group.extra
        return True

    def take_back(self, runner: str, indices: Iterable[int]) -> None:
        """Note that a runner has returned tasks that it had not begun.

        Args:
            runner: The runner's name. Tasks that were taken from it meanwhile are ignored.
            indices: The indices of all tasks of each group.
        """
        given = self._given.get(runner, {})
        groups = {id(self._groups[n]): self._groups[n] for n in indices if n in given}
        for group in groups.values():
            for one in group.members:
                del given[one.index], self._groups[one.index]
            self._extras[runner] -= group.extra
            self.returned.append(group)

    def lose(self, runner: str) -> Sequence[Assignment]:
        """Take back the tasks of a lost runner; return those that were lost too often."""
        left = self._given.pop(runner, {})
        del self._extras[runner]
        groups = {id(self._groups[index]): self._groups[index] for index in left}
        lost: list[Assignment] = []
        for group in groups.values():
            again = []
            for one in (left[one.index] for one in group.members if one.index in left):
                del self._groups[one.index]
                if one.attempt < self._most_attempts:
                    again.append(replace(one, attempt=one.attempt + 1))
                else:
                    lost.append(one)
            if again:
                self.returned.append(Group(tuple(again), group.extra))
        return lost
