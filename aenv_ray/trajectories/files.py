"""A file of episodes: one JSON line per finished episode."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import FileLock, write_atomically
from aenv_ray.trajectories.attachments import AttachmentFiles
from aenv_ray.trajectories.schema import Episode, check_version

logger = logging.getLogger("aenv_ray")
_INDEX: Final = re.compile(rb'\{"index":(\d+),')
"""The begin of an episode's line as it is written here."""


class EpisodeFile:
    """Appends episodes until a write fails; the run itself continues.

    Args:
        path: An existing file is replaced.
        kept: Episodes of an earlier run to start with.
        attachments: Where the contents of attachments are written. None: beside the file; if that
            is not a regular file, such as a pipe, only records are written.
        is_continued: Append to an existing file instead.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        kept: Iterable[Episode] = (),
        attachments: AttachmentFiles | None = None,
        *,
        is_continued: bool = False,
    ) -> None:
        self.failure: ConfigError | None = None
        """Why episodes are missing in the file; None if none are."""
        self._path = path
        try:
            kept = tuple(kept)
            if kept:
                lines = "".join(f"{episode.model_dump_json()}\n" for episode in kept)
                write_atomically(path, lines, mode=path.stat().st_mode & 0o777, durable=True)
            self._written = len(kept)
            self._file = path.open("a" if kept or is_continued else "w", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be written: {exc.strerror}", hint="choose another file"
            ) from exc
        self._attachments = attachments
        if attachments is None and path.is_file():
            self._attachments = AttachmentFiles(path, is_directory=False)

    def write(self, episode: Episode) -> None:
        """Append an episode; does nothing after a failed write. The first failure is logged.

        Its attachments are written before it, so that a record never lacks one.
        """
        if self.failure is not None:
            return
        try:
            if self._attachments is not None:
                self._attachments.write(episode.contents)
            elif any(step.attachments for step in episode.steps):
                logger.warning(
                    "the attachments of episode %d are not written: %s is not a regular file",
                    episode.index,
                    self._path,
                )
            self._file.write(episode.model_dump_json() + "\n")
            self._file.flush()
            self._written += 1
        except OSError as exc:
            self.failure = self._failed(exc)
        except ValueError as exc:  # JSON cannot represent a value
            self.failure = ConfigError(
                f"episode {episode.index} of task {episode.task_id!r} cannot be written to "
                f"{self._path}, which has {self._written} episodes: {exc}",
                hint="correct the task or the policy; episodes and summary() are complete",
            )
        if self.failure is not None:
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


class ContinuedFile(EpisodeFile):
    """Appends episodes to those of earlier processes, as the only process at that time.

    An incomplete last line is removed with a warning.

    Args:
        path: Created if missing.

    Raises:
        ConfigError: The file cannot be opened, another process or pool writes to it, or it has
            lines that are no episodes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, is_continued=True)
        self.next_index = 0
        """One more than the largest index in the file."""
        self._lock: FileLock | None = None
        if path.is_file():
            try:
                self._continue()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the file, any number of times; a failing flush is recorded as a failure."""
        super().close()
        if self._lock is not None:
            self._lock.close()

    def _continue(self) -> None:
        try:
            self._lock = FileLock.try_acquire(self._path)
            if self._lock is None:
                raise ConfigError(
                    f"{self._path} is being written by another process or pool",
                    hint="give a directory: it takes the records of several processes",
                )
            whole, rest = 0, b""
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        whole += len(line)
                        self._count(number, line)
                    else:
                        rest = line
            if rest.strip():
                try:
                    self._count(number, rest.strip())
                    self._file.write("\n")
                except ConfigError:
                    logger.warning("%s: the last line is incomplete and is removed", self._path)
                    self._file.truncate(whole)
        except OSError as exc:
            raise ConfigError(
                f"{self._path} cannot be continued: {exc.strerror}", hint="choose a directory"
            ) from exc

    def _count(self, number: int, line: bytes) -> None:
        """Note a line.

        Raises:
            ConfigError: It is not an episode.
        """
        if line.strip():
            found = _INDEX.match(line) if line.endswith(b"\n") else None
            index = int(found[1]) if found else _episode(self._path, number, line).index
            self.next_index = max(self.next_index, index + 1)
            self._written += 1


class Lines(NamedTuple):
    """The content of a JSON Lines file."""

    numbered: list[tuple[int, Episode]]
    """Each episode with the number of its line, from 1."""
    is_torn: bool
    """Whether the last line is incomplete; its episode is missing here."""

    @property
    def episodes(self) -> list[Episode]:
        """The episodes."""
        return [episode for _, episode in self.numbered]


def count_lines(path: Path) -> int:
    """Return the number of episodes that `read_lines` returns, without reading all of them.

    Raises:
        ConfigError: The file is missing or cannot be read.
    """
    *lines, rest = _content(path).split(b"\n")
    count = sum(bool(line.strip()) for line in lines)
    if rest.strip():
        with contextlib.suppress(ConfigError):  # it is torn
            _episode(path, len(lines) + 1, rest)
            count += 1
    return count


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}", hint="check the path and its permissions"
        ) from exc


def read_lines(path: Path) -> Lines:
    """Return the episodes of a JSON Lines file. Empty lines are skipped.

    Raises:
        ConfigError: The file is missing or cannot be read, or a complete line is not an episode.
    """
    *lines, rest = _content(path).split(b"\n")
    numbered = [(n, _episode(path, n, line)) for n, line in enumerate(lines, 1) if line.strip()]
    try:
        if rest.strip():
            numbered.append((len(lines) + 1, _episode(path, len(lines) + 1, rest)))
    except ConfigError:
        return Lines(numbered, is_torn=True)
    return Lines(numbered, is_torn=False)


def _episode(path: Path, number: int, line: bytes) -> Episode:
    try:
        episode = Episode.model_validate_json(line)
    except ValidationError:
        raise ConfigError(
            f"{path}, line {number}: not an episode",
            hint="give the output of `aenv sample` or `aenv_ray.sample`",
        ) from None
    check_version(episode.schema_version, f"{path}, line {number}")
    return episode


def of_another_run(where: str, number: int, task_id: str) -> ConfigError:
    """Return the error for a recorded episode that does not belong to this run."""
    return ConfigError(
        f"{where}: episode {number} is of task {task_id!r}, but this run has another task {number}",
        hint="resume with the same tasks and number of rollouts, or write to another file",
    )
