"""Whether a resumed run is the run that it continues: one summary is not to mix two of them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.schema import Episode, Task, recordable_task

logger = logging.getLogger("aenv_ray")
_FIELDS: Final = ("instruction", "setup", "reward", "submission")
"""What a task asks for, and how it is scored."""


def check_same_run(kept: Iterable[Episode], where: Path, *, policy: str, samples: int) -> None:
    """Check that recorded episodes are of a policy and a number of samples per task.

    Args:
        kept: The episodes. A field that a record lacks is not compared.
        where: The output that has them.
        policy: Name of the policy.
        samples: Episodes of each task.

    Raises:
        ConfigError: They are not.
    """
    for episode in kept:
        if episode.policy not in (None, policy):
            raise ConfigError(
                f"{where} has episodes of the policy {episode.policy!r}, but this run has the "
                f"policy {policy!r}",
                hint="resume with the same policy, or write to another file; the name of a policy "
                "is its attribute `name`, or module:function",
            )
        number, sample = divmod(episode.index, samples)
        expected = (None, None) if samples == 1 else (str(number), sample)
        if (episode.group, episode.sample) != expected:
            raise ConfigError(
                f"{where} is of a run with another samples_per_task than {samples}: episode "
                f"{episode.index} has the group {episode.group!r} and the sample {episode.sample}",
                hint="resume with the same samples_per_task, or write to another file",
            )


def check_same_task(task: Task, recorded: Task | None, where: str) -> None:
    """Check that a recorded task asks for the same, and is scored in the same way.

    Args:
        task: The task of this run.
        recorded: That of the earlier run, with the same id; None if it was not recorded.
        where: The output that has it.

    Raises:
        ConfigError: It does not.
    """
    if recorded is None or recorded == task:
        return
    before, now = _compared(recorded), _compared(recordable_task(task))
    for field in _FIELDS:
        if before[field] != now[field]:
            raise ConfigError(
                f"{where} has episodes of task {task.id!r} with another {field}: "
                f"{_short(before[field])}, but this run has {_short(now[field])}",
                hint="resume with the same tasks, or write to another file; `aenv rescore` "
                "computes the rewards of recorded episodes again",
            )


def _compared(task: Task) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(task.model_dump_json(include=set(_FIELDS)))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}…"


def warn_if_changed(earlier: Mapping[str, int], digest: str, environment: str) -> None:
    """Log that the environment is not the one that played recorded episodes.

    It is no error: a digest covers all files of a project, so also a note or an output in it.

    Args:
        earlier: The number of recorded episodes for each digest.
        digest: The digest of this run's environment.
        environment: Its name or path.
    """
    others = {one: count for one, count in earlier.items() if one != digest}
    if others:
        logger.warning(
            "the files of %s have changed since %d of the episodes that are kept: their "
            "environment_digest is %s, and that of further episodes %s; if that affects results, "
            "write to another file, or compute the rewards again with `aenv rescore`",
            environment, sum(others.values()), ", ".join(sorted(others)), digest,
        )  # fmt: skip


def digests_of(kept: Iterable[Episode]) -> Counter[str]:
    """Return the number of episodes for each digest of their environment."""
    return Counter(e.environment_digest for e in kept if e.environment_digest is not None)
