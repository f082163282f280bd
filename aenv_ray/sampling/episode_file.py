"""The file that gets one JSON line for each finished episode."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.episode import Episode, EpisodeStatus, Task
from aenv_ray.sampling.tasks import of_another_run

logger = logging.getLogger("aenv_ray")


class EpisodeFile:
    """Takes episodes until a write fails; that ends the writing, not the run that makes them.

    Args:
        path: Replaced when it exists.
        kept: Episodes that it begins with, of an earlier run.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: Path, kept: Iterable[Episode] = ()) -> None:
        self.failure: ConfigError | None = None
        """Why not every episode is in the file; None while every one is."""
        self._path = path
        try:
            kept = tuple(kept)
            if kept:
                _replace(path, kept)
            self._written = len(kept)
            self._file = path.open("a" if kept else "w", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be written: {exc.strerror}", hint="name another file"
            ) from exc

    def write(self, episode: Episode) -> None:
        """Append an episode; nothing once a write has failed. The first failure is logged."""
        if self.failure is not None:
            return
        try:
            self._file.write(episode.model_dump_json() + "\n")
            self._file.flush()
            self._written += 1
        except OSError as exc:
            self.failure = self._failed(exc)
            logger.warning("%s; the run goes on", self.failure.message)

    def close(self) -> None:
        """Close it, any number of times; what cannot be written even now is a failure."""
        try:
            self._file.close()
        except OSError as exc:
            self.failure = self.failure or self._failed(exc)
            with contextlib.suppress(OSError):  # the second attempt drops what is buffered
                self._file.close()

    def _failed(self, exc: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {exc.strerror}; it has {self._written} episodes",
            hint="make room or name another file; the sampling's episodes and summary() are whole",
        )


def _replace(path: Path, episodes: Iterable[Episode]) -> None:
    """Write a file anew in one step: whatever ends us, the old one or the new one is there."""
    whole = path.with_name(f"{path.name}.part")
    with whole.open("w", encoding="utf-8") as file:
        file.writelines(f"{episode.model_dump_json()}\n" for episode in episodes)
        file.flush()
        os.fsync(file.fileno())
    whole.replace(path)


def finished_episodes(path: Path, tasks: Sequence[Task] | None) -> list[Episode]:
    """Return the episodes of an interrupted run that need not run again.

    Those that the infrastructure failed do. A last line that was not written whole counts for none.

    Args:
        path: The run's output; there need be none.
        tasks: Of the run. None: they are not known yet, and `TaskFeed.skip` compares them.

    Raises:
        ConfigError: It cannot be read, or is of other tasks.
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
                f"{where}: it is no episode", hint="name the run's own file"
            ) from None
        if not _is_of(episode, tasks):
            raise of_another_run(where, episode.index, episode.task_id)
        if episode.status is not EpisodeStatus.INFRA_FAILED:
            found[episode.index] = episode
    return list(found.values())


def _is_of(episode: Episode, tasks: Sequence[Task] | None) -> bool:
    index = episode.index
    if tasks is None:
        return index >= 0
    return 0 <= index < len(tasks) and tasks[index].id == episode.task_id
