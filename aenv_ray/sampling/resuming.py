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
_NOT_COMPARED: Final = frozenset({"archives", "timeout_s"})
"""Of a call: where its files are on this machine, and how long it may take."""
_SHOWN: Final = 100
"""Maximum number of characters of a value in a message."""
_SHOWN_BEFORE: Final = 20
"""How many of them are before the first difference."""


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
            was, is_now = _differing(before[field], now[field])
            raise ConfigError(
                f"{where} has episodes of task {task.id!r} with another {field}: "
                f"{was}, but this run has {is_now}",
                hint="resume with the same tasks, or write to another file; `aenv rescore` "
                "computes the rewards of recorded episodes again",
            )


def _compared(task: Task) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(task.model_dump_json(include=set(_FIELDS)))
    return {field: _without_place(value) for field, value in found.items()}


def _without_place(value: Any) -> Any:
    """Return a field of a task without what may differ where the same task is played again."""
    if not isinstance(value, dict):
        return value
    return {key: one for key, one in value.items() if key not in _NOT_COMPARED}


def _differing(before: Any, now: Any) -> tuple[str, str]:
    """Return two different values as text, each from shortly before their first difference."""
    texts = [json.dumps(one, ensure_ascii=False, sort_keys=True) for one in (before, now)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(map(len, texts)))
    start = max(0, same - _SHOWN_BEFORE) if max(map(len, texts)) > _SHOWN else 0
    was, is_now = (_excerpt(text, start) for text in texts)
    return was, is_now


def _excerpt(text: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if len(text) > end else ''}"


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
