"""Comparing recorded episodes: two runs, or a recording and its replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step


class Difference(BaseModel):
    """Where two episodes of one task differ; the first difference of their steps."""

    model_config = ConfigDict(frozen=True)

    task_id: str
    before_index: int
    after_index: int
    before_status: EpisodeStatus
    after_status: EpisodeStatus
    before_reward: float | None
    after_reward: float | None
    step: int | None = None
    """Number of the first step that differs, from 0; None if the steps are equal."""
    field: str | None = None
    """What differs in that step; ``missing`` or ``extra`` if only one episode has it."""
    before: str | None = None
    """Its value before."""
    after: str | None = None
    """Its value after."""


class Comparison(BaseModel):
    """What the comparison of two sets of episodes found."""

    model_config = ConfigDict(frozen=True)

    compared: int
    equal: int
    differences: tuple[Difference, ...]
    only_before: int
    """Episodes without a counterpart."""
    only_after: int


def compare(
    before: Iterable[Episode], after: Iterable[Episode], *, by_index: bool = False
) -> Comparison:
    """Return where two sets of episodes differ.

    Args:
        before: The episodes to compare with.
        after: The episodes to compare.
        by_index: Match episodes of one index, rather than by their order within a task.
    """
    old, new = _matched(before, by_index), _matched(after, by_index)
    pairs = [
        pair
        for key, episodes in old.items()
        for pair in zip(episodes, new.get(key, []), strict=False)
    ]
    found = [difference for pair in pairs if (difference := compare_episodes(*pair)) is not None]
    return Comparison(
        compared=len(pairs),
        equal=len(pairs) - len(found),
        differences=tuple(found),
        only_before=sum(map(len, old.values())) - len(pairs),
        only_after=sum(map(len, new.values())) - len(pairs),
    )


def compare_episodes(before: Episode, after: Episode) -> Difference | None:
    """Return where two episodes differ; None if status, reward and steps are equal.

    Times, ids and nodes are not compared.
    """
    step = _first_difference(before.steps, after.steps)
    if step is None and (before.status, before.reward) == (after.status, after.reward):
        return None
    number, field, old, new = step or (None, None, None, None)
    return Difference(
        task_id=before.task_id,
        before_index=before.index,
        after_index=after.index,
        before_status=before.status,
        after_status=after.status,
        before_reward=before.reward,
        after_reward=after.reward,
        step=number,
        field=field,
        before=old,
        after=new,
    )


def _first_difference(
    before: tuple[Step, ...], after: tuple[Step, ...]
) -> tuple[int, str, str | None, str | None] | None:
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        for field in ("tool", "arguments", "error", "is_error", "text"):
            values = getattr(old, field), getattr(new, field)
            if values[0] != values[1]:
                return number, field, str(values[0]), str(values[1])
    if len(before) > len(after):
        return len(after), "missing", before[len(after)].tool, None
    if len(after) > len(before):
        return len(before), "extra", None, after[len(before)].tool
    return None


def _matched(
    episodes: Iterable[Episode], by_index: bool
) -> dict[tuple[str, int | None], list[Episode]]:
    found: dict[tuple[str, int | None], list[Episode]] = defaultdict(list)
    for episode in sorted(episodes, key=lambda one: one.index):
        found[episode.task_id, episode.index if by_index else None].append(episode)
    return found
