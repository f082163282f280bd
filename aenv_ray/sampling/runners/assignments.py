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

    One task may end every runner that plays it, for example because its policy exits the process.
    It must not use up the attempts of the tasks beside it. So the groups that a lost runner had
    begun, and that have one attempt left, become a batch that is played with nothing beside it. If
    the batch loses its runner too, it is halved, until it is a single group: that one is given up.

    Args:
        most_attempts: How often to try one task; a task that was lost that often is not handed out
            again.
    """

    def __init__(self, most_attempts: int) -> None:
        self._most_attempts = most_attempts
        self._given: dict[str, dict[int, Assignment]] = {}
        """Tasks by runner and index, in the order in which the runner begins them."""
        self._extras: Counter[str] = Counter()
        """By runner: the extra samples of its unfinished groups."""
        self._groups: dict[int, Group] = {}
        self._lost: set[int] = set()
        """Unfinished tasks of which a runner was lost."""
        self.returned: deque[Group] = deque()
        """Groups of lost and slow runners, to be handed out before others."""
        self.suspects: deque[tuple[Group, ...]] = deque()
        """Batches of groups on their last attempt. A batch, or what a runner has room for, is given
        to a runner that has nothing else, and gets nothing else until they are finished."""

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
        return not self._groups and not self.returned and not self.suspects

    def has_lost(self, runner: str) -> bool:
        """Whether a runner has an unfinished task with which another one was lost."""
        given = self._given.get(runner)
        return given is not None and not given.keys().isdisjoint(self._lost)

    def were_lost(self, groups: Iterable[Group]) -> bool:
        """Whether a runner was lost with an unfinished task of these groups."""
        return bool(self._lost) and any(
            one.index in self._lost for group in groups for one in group.members
        )

    def finish(self, runner: str, index: int) -> bool:
        """Note that a runner has played a task; False if it is not that runner's any more."""
        given = self._given.get(runner, {})
        if given.pop(index, None) is None:
            return False
        self._lost.discard(index)
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
        self._return(groups.values())

    def lose(self, runner: str, most: int, *, was_apart: bool = False) -> Sequence[Assignment]:
        """Take back the tasks of a lost runner; return those that were lost too often.

        Args:
            runner: The runner's name.
            most: How many episodes it played at most. Groups that it had not begun keep their
                attempts.
            was_apart: Whether it played a batch of `suspects`.
        """
        left = self._given.pop(runner, {})
        del self._extras[runner]
        groups = list({id(self._groups[index]): self._groups[index] for index in left}.values())
        unfinished = [
            Group(tuple(left[one.index] for one in group.members if one.index in left), group.extra)
            for group in groups
        ]
        for index in left:
            del self._groups[index]
        self._lost.update(left)
        begun = _begun(unfinished, most)
        waiting = unfinished[begun:]
        if was_apart and begun > 1:
            middle = begun // 2
            self.suspects += (tuple(unfinished[:middle]), tuple(unfinished[middle:begun]))
            self._return(waiting)
            return ()
        lost: list[Assignment] = []
        again: list[Group] = []
        for group in unfinished[:begun]:
            members = [one for one in group.members if one.attempt < self._most_attempts]
            lost += (one for one in group.members if one.attempt >= self._most_attempts)
            if members:
                tried = tuple(replace(one, attempt=one.attempt + 1) for one in members)
                again.append(Group(tried, group.extra))
        self._lost.difference_update(one.index for one in lost)
        self._return([*again, *waiting])
        return lost

    def _return(self, groups: Iterable[Group]) -> None:
        """Hand groups out again: those on their last attempt apart from others."""
        suspects: list[Group] = []
        for group in groups:
            is_last = max(one.attempt for one in group.members) == self._most_attempts > 1
            (suspects if is_last else self.returned).append(group)
        if suspects:
            self.suspects.append(tuple(suspects))


def _begun(groups: Sequence[Group], most: int) -> int:
    """Return how many of the groups a runner of `most` episodes has begun, in their order."""
    playing = 0
    for number, group in enumerate(groups):
        if playing and playing + group.size > most:
            return number
        playing += group.size
    return len(groups)
