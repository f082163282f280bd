"""The output file of a run: one JSON line per finished episode, and resuming from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task

logger = logging.getLogger("aenv_ray")


class EpisodeFile:
    """Appends episodes until a write fails; the run itself continues.

    Args:
        path: An existing file is replaced.
        kept: Episodes of an earlier run to start with.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: Path, kept: Iterable[Episode] = ()) -> None:
        self.failure: ConfigError | None = None
        """Why episodes are missing in the file; None if none are."""
        self._path = path
        try:
            kept = tuple(kept)
            if kept:
                lines = "".join(f"{episode.model_dump_json()}\n" for episode in kept)
                write_atomically(path, lines, mode=path.stat().st_mode & 0o777, durable=True)
            self._written = len(kept)
            self._file = path.open("a" if kept else "w", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be written: {exc.strerror}", hint="choose another file"
            ) from exc

    def write(self, episode: Episode) -> None:
        """Append an episode; does nothing after a failed write. The first failure is logged."""
        if self.failure is not None:
            return
        try:
            self._file.write(episode.model_dump_json() + "\n")
            self._file.flush()
            self._written += 1
        except OSError as exc:
            self.failure = self._failed(exc)
            logger.warning("%s; the run continues", self.failure.message)

    def close(self) -> None:
        """Close the file, any number of times; a failing flush is recorded as a failure."""
        try:
            self._file.close()
        except OSError as exc:
            self.failure = self.failure or self._failed(exc)
            with contextlib.suppress(OSError):  # the second attempt drops the buffer
                self._file.close()

    def _failed(self, exc: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {exc.strerror}; it has {self._written} episodes",
            hint="free space or choose another file; episodes and summary() are complete",
        )


def finished_episodes(path: Path, tasks: Sequence[Task] | None) -> list[Episode]:
    """Return the episodes of an interrupted run that need not run again.

    Episodes with infrastructure failures run again. An incomplete last line is ignored.

    Args:
        path: The run's output file; it may be missing.
        tasks: The tasks of the run. None if they are not known yet; `TaskFeed.skip` compares them.

    Raises:
        ConfigError: The file cannot be read, or belongs to other tasks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    *lines, _ = text.split("\n")
    found: dict[int, Episode] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            episode = Episode.model_validate_json(line)
        except ValidationError:
            raise ConfigError(
                f"{where}: not an episode", hint="give the output file of the run to resume"
            ) from None
        if not _is_of(episode, tasks):
            raise of_another_run(where, episode.index, episode.task_id)
        if episode.status is not EpisodeStatus.INFRA_FAILED:
            found[episode.index] = episode
    return list(found.values())


def of_another_run(where: str, number: int, task_id: str) -> ConfigError:
    """Return the error for a recorded episode that does not belong to this run."""
    return ConfigError(
        f"{where}: episode {number} is of task {task_id!r}, but this run has another task {number}",
        hint="resume with the same tasks and number of rollouts, or write to another file",
    )


def _is_of(episode: Episode, tasks: Sequence[Task] | None) -> bool:
    index = episode.index
    if tasks is None:
        return index >= 0
    return 0 <= index < len(tasks) and tasks[index].id == episode.task_id
