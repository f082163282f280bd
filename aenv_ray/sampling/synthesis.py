"""Synthesis of tasks: keeps the proposals of a generator that prove to be right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, field_validator

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.policies.scripted import null, reference
from aenv_ray.sampling.sampler import Sampling, sample
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.sampling.tasks.feed import checked_task
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task, recordable_task
from aenv_ray.trajectories.storable import storable_text

REPETITIONS: Final = 3
"""How often each policy plays a task."""


class DropReason(StrEnum):
    """Why a proposed task was not kept."""

    INVALID = "invalid"
    """It is not a task, or lacks a reference solution or a reward."""
    DUPLICATE = "duplicate"
    """Another task has its id, or asks for the same in the same situation."""
    REFERENCE_FAILED = "reference_failed"
    """The reward does not confirm the reference solution."""
    NULL_REWARDED = "null_rewarded"
    """The reward is too high for an agent that does nothing."""
    UNSTABLE = "unstable"
    """The same actions get different rewards."""
    UNCHECKED = "unchecked"
    """The infrastructure failed: it says nothing about the task, which may be proposed again."""


class DroppedTask(BaseModel):
    """A proposed task that was not kept."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    number: int
    """The number of the proposal, from 0."""
    task_id: str | None
    """Its id; None if it has none."""
    reason: DropReason
    """Why it was not kept."""
    detail: str
    """What was found."""

    @field_validator("task_id", "detail")
    @classmethod
    def _storable(cls, value: str | None) -> str | None:
        return value if value is None else storable_text(value)


class Synthesis(BaseModel):
    """What became of the proposed tasks."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    proposed: int
    """Number of proposals."""
    kept: tuple[Task, ...]
    """The tasks that were confirmed, in the order of their proposals."""
    dropped: tuple[DroppedTask, ...]
    """The others, in that order."""

    def counts(self) -> dict[DropReason, int]:
        """Return how many tasks were dropped for each reason that occurred."""
        reasons = [one.reason for one in self.dropped]
        return {reason: reasons.count(reason) for reason in DropReason if reason in reasons}

    def recordable(self) -> Synthesis:
        """Return it with the tasks as a file can hold them; see `recordable_task`."""
        return self.model_copy(update={"kept": tuple(map(recordable_task, self.kept))})


Play = Callable[[Sampling], None]
"""Runs a sampling to its end."""


class Synthesizer:
    """Checks proposed tasks on an environment.

    A task is kept if its reference solution earns `pass_reward` and an agent that does nothing
    earns at most `null_reward`, each with the same reward in all repetitions.

    Args:
        environment: As in `sample`.
        known: Tasks that exist already; a proposal that repeats one is a duplicate.
        repetitions: How often each policy plays a task; at least 2.
        pass_reward: Least reward of the reference solution.
        null_reward: Highest reward of an agent that does nothing.
        play: Runs each of the two samplings, for example with a progress bar.
        options: Further arguments of `sample`.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        environment: str | Path,
        *,
        known: Iterable[Task] = (),
        repetitions: int = REPETITIONS,
        pass_reward: float = 1.0,
        null_reward: float = 0.0,
        play: Play | None = None,
        **options: Any,
    ) -> None:
        if repetitions < 2:
            raise ConfigError(
                f"repetitions must be at least 2, not {repetitions}: otherwise it is not known "
                "whether rewards are stable",
                hint="pass 2 or more",
            )
        if not null_reward < pass_reward:
            raise ConfigError(
                f"null_reward {null_reward:g} must be less than pass_reward {pass_reward:g}",
                hint="a solution must be rewarded more than doing nothing",
            )
        self._environment = environment
        self._repetitions = repetitions
        self._pass_reward = pass_reward
        self._null_reward = null_reward
        self._play = play or _run
        self._options = options
        existing = tuple(known)
        self._ids = {task.id for task in existing}
        self._questions = {_question(task) for task in existing}

    def check(self, proposals: Iterable[Task | Mapping[str, Any]]) -> Synthesis:
        """Check proposals; the iterable is read to its end first.

        Raises:
            ConfigError: The iterable raised.
            AenvError: As `Sampling.run`.
        """
        dropped: list[DroppedTask] = []
        found: dict[int, Task] = {}
        count, known = 0, set(self._ids)
        for number, proposal in enumerate(_read(proposals)):
            count += 1
            task = self._valid(number, proposal, dropped)
            if task is not None:
                found[number] = task
        for policy, verdict in ((reference, self._of_reference), (null, self._of_null)):
            found = self._confirmed(found, policy, verdict, dropped)
        kept = self._distinct(found, dropped)
        # A task that was dropped may be proposed again, corrected.
        self._ids = known | {task.id for task in kept}
        self._questions |= {_question(task) for task in kept}
        dropped.sort(key=lambda one: one.number)
        return Synthesis(proposed=count, kept=tuple(kept), dropped=tuple(dropped))

    def _valid(self, number: int, proposal: Any, dropped: list[DroppedTask]) -> Task | None:
        """Return the task of a proposal; None if it is dropped before anything is played."""

        def drop(task_id: Any, reason: DropReason, detail: str) -> None:
            name = task_id if isinstance(task_id, str) else None
            one = DroppedTask(number=number, task_id=name, reason=reason, detail=detail)
            dropped.append(one)

        where = f"proposal {number}"
        try:
            task = checked_task(where, proposal)
        except ConfigError as exc:
            task_id = proposal.get("id") if isinstance(proposal, Mapping) else None
            drop(task_id, DropReason.INVALID, exc.message.removeprefix(f"{where}: "))
            return None
        try:
            check_files([task], "a proposal", hint="")
        except ConfigError as exc:  # models propose tasks, too
            drop(task.id, DropReason.INVALID, exc.message)
            return None
        if not task.reference or task.reward is None:
            lacking = "reward" if task.reference else "reference solution"
            drop(task.id, DropReason.INVALID, f"it has no {lacking}")
        elif task.id in self._ids:
            drop(task.id, DropReason.DUPLICATE, "another task has this id")
        elif _question(task) in self._questions:
            drop(task.id, DropReason.DUPLICATE, "a known task asks for the same")
        else:
            self._ids.add(task.id)
            return task
        return None

    def _confirmed(
        self,
        found: Mapping[int, Task],
        policy: Any,
        verdict: Callable[[Sequence[Episode]], tuple[DropReason, str] | None],
        dropped: list[DroppedTask],
    ) -> dict[int, Task]:
        """Play tasks, and return those against which the rewards say nothing."""
        if not found:
            return {}
        episodes: dict[int, list[Episode]] = {number: [] for number in found}
        numbers = list(found)
        sampling = sample(
            self._environment,
            policy,
            list(found.values()),
            samples_per_task=self._repetitions,
            **self._options,
        )
        self._play(sampling)
        for episode in sampling.episodes:
            episodes[numbers[episode.index // self._repetitions]].append(episode)
        kept: dict[int, Task] = {}
        for number, task in found.items():
            wrong = self._unplayed(episodes[number]) or verdict(episodes[number])
            if wrong is None:
                kept[number] = task
                continue
            reason, detail = wrong
            dropped.append(
                DroppedTask(number=number, task_id=task.id, reason=reason, detail=detail)
            )
        return kept

    def _unplayed(self, episodes: Sequence[Episode]) -> tuple[DropReason, str] | None:
        for one in episodes:
            if one.status is EpisodeStatus.INFRA_FAILED:
                return DropReason.UNCHECKED, one.error or one.status.value
        if len(episodes) < self._repetitions:
            return DropReason.UNCHECKED, "the run was stopped"
        return None

    def _of_reference(self, episodes: Sequence[Episode]) -> tuple[DropReason, str] | None:
        failed = [one for one in episodes if one.status is not EpisodeStatus.COMPLETED]
        if failed and len(failed) < len(episodes):
            return DropReason.UNSTABLE, f"reference: {_outcomes(episodes)}"
        if failed:
            return DropReason.REFERENCE_FAILED, failed[0].error or failed[0].status.value
        if len({one.reward for one in episodes}) > 1:
            return DropReason.UNSTABLE, f"reference: {_outcomes(episodes)}"
        reward = episodes[0].reward
        if reward is None or reward < self._pass_reward:
            return DropReason.REFERENCE_FAILED, f"the reference solution earns {reward}"
        return None

    def _of_null(self, episodes: Sequence[Episode]) -> tuple[DropReason, str] | None:
        """Judge an agent that did nothing: a reward may raise for it, since nothing is there."""
        if len({(one.status, one.reward) for one in episodes}) > 1:
            return DropReason.UNSTABLE, f"null: {_outcomes(episodes)}"
        reward = episodes[0].reward
        if reward is not None and reward > self._null_reward:
            return DropReason.NULL_REWARDED, f"an agent that does nothing earns {reward:g}"
        return None

    def _distinct(self, found: Mapping[int, Task], dropped: list[DroppedTask]) -> list[Task]:
        """Return confirmed tasks without those that ask for the same as an earlier one.

        Only now: the reference solution of an earlier one may have been wrong.
        """
        kept: list[Task] = []
        first: dict[str, str] = {}
        for number, task in found.items():
            question = _question(task)
            if question in first:
                detail = f"the task {first[question]!r} asks for the same"
                one = DroppedTask(
                    number=number, task_id=task.id, reason=DropReason.DUPLICATE, detail=detail
                )
                dropped.append(one)
            else:
                first[question] = task.id
                kept.append(task)
        return kept


def _run(sampling: Sampling) -> None:
    sampling.run()


def _outcomes(episodes: Sequence[Episode]) -> str:
    """Return outcomes and rewards in the order of the samples."""
    ordered = sorted(episodes, key=lambda one: one.index)
    return ", ".join(
        f"{one.reward:g}" if one.reward is not None else one.status.value for one in ordered
    )


def _question(task: Task) -> str:
    """Return what a task asks for: equal for tasks that differ only in id, solution or spaces."""
    written = recordable_task(task)
    data = written.model_dump(mode="json", exclude={"id", "reference", "wrong"})
    data["instruction"] = " ".join(task.instruction.casefold().split())
    if not data["instruction"]:
        data["reference"] = [call.model_dump(mode="json") for call in written.reference]
    return json.dumps(data, sort_keys=True)


def _read(proposals: Iterable[Any]) -> list[Any]:
    try:
        return list(proposals)
    except ConfigError:  # of a file
        raise
    except Exception as exc:
        raise ConfigError(
            f"the generator of tasks raised {type(exc).__name__}: {exc}",
            hint="a generator is called with a seed, and returns or yields tasks",
        ) from exc


def proposals_of(generator: Callable[..., Any], count: int, seed: int) -> Iterator[Any]:
    """Yield at most `count` proposals of a generator, which is called with `seed`."""
    yield from itertools.islice(generator(seed), count)


def synthesize(
    environment: str | Path,
    proposals: Iterable[Task | Mapping[str, Any]],
    **options: Any,
) -> Synthesis:
    """Check proposed tasks, and return those that prove to be right.

    Args:
        environment: As in `sample`.
        proposals: Tasks with reference solutions.
        options: The options of `Synthesizer`, and further ones of `sample`.

    Raises:
        ConfigError: An option is invalid, or the iterable raised.
        AenvError: As `Sampling.run`.
    """
    return Synthesizer(environment, **options).check(proposals)
