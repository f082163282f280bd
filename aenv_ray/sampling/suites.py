"""Suites: several benchmarks that one policy plays, one after another."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from aenv_ray.errors import ConfigError
from aenv_ray.project.project import named_on_command_line
from aenv_ray.sampling.runners.concurrency import concurrency_bounds
from aenv_ray.sampling.tasks.environment_tasks import tasks_of
from aenv_ray.sampling.tasks.selection import select_tasks
from aenv_ray.trajectories.schema import Episode, Task
from aenv_ray.trajectories.statistics import (
    PassAtK,
    confidence_interval,
    is_refused,
    is_success,
    is_void,
    pass_at_k,
)
from aenv_ray.units import parse_duration_s
from aenv_ray.validation import problems_of


class Benchmark(BaseModel):
    """One benchmark of a suite: an environment, and which of its tasks are played."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: str
    """Name, ``name@version`` or the path of a project."""
    name: str = ""
    """In the table, and of the output file. Default: the environment."""
    tasks: str | None = None
    """File, directory or data set. Default: the environment's own tasks."""
    task_ids: tuple[str, ...] = ()
    """Ids or patterns of the tasks to keep; empty keeps all."""
    task_fields: dict[str, str] = Field(default_factory=dict)
    """Columns of fields of tasks."""
    shuffle: int | None = None
    """Seed of the order of tasks."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of tasks, after shuffling."""
    samples_per_task: int | None = Field(default=None, ge=1)
    """Episodes of each task."""
    concurrency: int | tuple[int, int] | str | None = None
    """Concurrent episodes: a number, or a lower and an upper bound."""
    engine: str | None = None
    ttl: str | None = None
    episode_timeout: str | None = None
    environment_variables: dict[str, str] = Field(default_factory=dict)

    @field_validator("ttl", "episode_timeout")
    @classmethod
    def _is_duration(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_duration_s(value)
            except ConfigError as exc:
                raise ValueError(exc.message) from None
        return value

    @field_validator("concurrency")
    @classmethod
    def _is_concurrency(
        cls, value: int | tuple[int, int] | str | None
    ) -> int | tuple[int, int] | str | None:
        if value is not None:
            try:
                concurrency_bounds(value)
            except ConfigError as exc:
                raise ValueError(exc.message) from None
        return value

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or self.environment

    def chosen_tasks(self, limit: int | None) -> Sequence[Task]:
        """Return the tasks to play.

        Args:
            limit: Maximum number of tasks of each benchmark that sets no limit.

        Raises:
            ConfigError: There are none, or they are malformed.
            AenvError: The environment does not exist.
        """
        found = tasks_of(self.environment, self.tasks, self.task_fields, self.environment_variables)
        most = self.limit if self.limit is not None else limit
        return select_tasks(found, ids=self.task_ids, shuffle=self.shuffle, limit=most)


class BenchmarkResult(BaseModel):
    """What a policy has earned in a benchmark."""

    model_config = ConfigDict(frozen=True)

    benchmark: str
    environment: str
    tasks: int
    """Tasks that were played."""
    episodes: int
    """Episodes that were played."""
    succeeded: int
    void: int
    """Played episodes without a reward, which are in no mean."""
    refused: int
    """Episodes that were not played, because their task needs what is not available here."""
    reward_mean: float | None
    confidence_interval: tuple[float, float] | None
    """95 %, see `aenv_ray.trajectories.statistics.confidence_interval`."""
    pass_at_k: tuple[PassAtK, ...]
    wall_s: float
    is_complete: bool
    """Whether all of its episodes were played."""
    error: str | None = None
    """Why it has ended early."""


def read_suite(text: str) -> list[Benchmark]:
    """Return the benchmarks of a suite.

    Args:
        text: Environments, separated by commas; or a TOML or JSON file with a list ``benchmarks``,
            whose tables have the fields of `Benchmark`. Paths in it are relative to the file.

    Raises:
        ConfigError: The file cannot be read, a field is wrong, or two benchmarks have one name.
    """
    path = Path(text)
    if path.suffix.lower() in {".toml", ".json"}:
        found = [_relative(one, path.parent) for one in _of_file(path)]
    else:
        named = [one.strip() for one in text.split(",") if one.strip()]
        found = [_relative(Benchmark(environment=one), Path()) for one in named]
    if not found:
        raise ConfigError(
            f"the suite {text!r} has no benchmarks",
            hint="name benchmarks, separated by commas, or a suite file",
        )
    labels = [one.label for one in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"two benchmarks of the suite are named {label!r}",
                hint="give them different names in the field name",
            )
    return found


def _of_file(path: Path) -> list[Benchmark]:
    try:
        text = path.read_text(encoding="utf-8")
        data: Any = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"suite {path} cannot be read: {exc}", hint="give a readable JSON or TOML file in UTF-8"
        ) from None
    rows = data.get("benchmarks") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise ConfigError(
            f"suite {path} has no list of benchmarks",
            hint='write [[benchmarks]] and environment = "NAME" for each one',
        )
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(Benchmark.model_validate(row))
        except ValidationError as exc:
            raise ConfigError(
                f"suite {path}, benchmark {number + 1}: {problems_of(exc)}",
                hint="correct these fields",
            ) from None
    return found


def _relative(benchmark: Benchmark, directory: Path) -> Benchmark:
    """Return a benchmark whose paths are relative to the working directory."""
    changes = {}
    named = named_on_command_line(benchmark.environment, directory)
    if named != benchmark.environment:
        changes["environment"] = named
        if not benchmark.name:
            changes["name"] = Path(named).name
    if benchmark.tasks is not None and (directory / benchmark.tasks).exists():
        changes["tasks"] = str(directory / benchmark.tasks)
    return benchmark.model_copy(update=changes)


def result_of(
    benchmark: Benchmark,
    episodes: Sequence[Episode],
    wall_s: float,
    *,
    is_complete: bool,
    error: str | None = None,
) -> BenchmarkResult:
    """Return what episodes of a benchmark have earned."""
    played = [one for one in episodes if not is_refused(one)]
    rewards = [one.reward for one in played if one.reward is not None]
    return BenchmarkResult(
        benchmark=benchmark.label,
        environment=next((e.environment for e in episodes if e.environment), benchmark.environment),
        tasks=len({one.task_id for one in played}),
        episodes=len(played),
        succeeded=sum(map(is_success, played)),
        void=sum(map(is_void, played)),
        refused=len(episodes) - len(played),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        confidence_interval=confidence_interval(played),
        pass_at_k=pass_at_k(played),
        wall_s=wall_s,
        is_complete=is_complete,
        error=error,
    )
