"""A file of episodes: one JSON line per finished episode."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.trajectories.attachments import AttachmentFiles
from aenv_ray.trajectories.output_lock import OutputLock
from aenv_ray.trajectories.schema import Episode, check_version

logger = logging.getLogger("aenv_ray")
_INDEX: Final = re.compile(rb'\{"index":(\d+),')
"""The begin of an episode's line as it is written here."""
_LOOK_EVERY_S: Final = 1.0
"""How often it is checked whether an output is still where it was opened."""
_RETRY_EVERY_S: Final = 10.0
"""How long episodes that could not be written are held before they are tried again."""
_RETRY_AT_ONCE: Final = 100
"""How many of them are tried with one episode: the event loop of the others waits meanwhile."""


class EpisodeFile:
    """Appends episodes; if that fails, the run itself continues.

    Args:
        path: An existing file is replaced.
        kept: Episodes of an earlier run to start with.
        attachments: Where the contents of attachments are written. None: beside the file; if that
            is not a regular file, such as a pipe, only records are written.
        is_continued: Append to an existing file instead.
        lock: The lock on the file; it is closed with the file.
        is_retried: Hold the episodes that cannot be written, and write them when there is room
            again. Otherwise the first failure is final.
        gone_earlier: Returns how many episodes of earlier files of the same output are gone.

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
        lock: OutputLock | None = None,
        is_retried: bool = False,
        gone_earlier: Callable[[], int] = lambda: 0,
    ) -> None:
        self.failure: ConfigError | None = None
        """Why episodes are missing in the file at present; None if none are."""
        self.unwritten: list[Episode] = []
        """The missing episodes, in order, if they are held."""
        self.is_gone = False
        """Whether the file was removed, moved or replaced by others."""
        self._path = path
        self._lock = lock
        self._is_retried = is_retried
        self._gone_earlier = gone_earlier
        self._place = path.absolute()  # the policy may change the working directory
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        self._retry_at = math.inf
        self._is_torn = False
        try:
            kept = tuple(kept)
            if kept:
                lines = "".join(f"{episode.model_dump_json()}\n" for episode in kept)
                write_atomically(path, lines, mode=path.stat().st_mode & 0o777, durable=True)
                if lock is not None:
                    lock.follow()
            self._written = len(kept)
            self._file = path.open("ab", buffering=0)
            opened = os.fstat(self._file.fileno())
            self._is_regular = stat.S_ISREG(opened.st_mode)
            if self._is_regular and not (kept or is_continued):
                self._file.truncate(0)
            # Some network file systems give an open file another number than its path has.
            self._has_number = os.path.samestat(opened, path.stat())
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be written: {exc.strerror}", hint="choose another file"
            ) from exc
        self._attachments = attachments
        if attachments is None and self._is_regular:
            self._attachments = AttachmentFiles(self._place, is_directory=False)

    @property
    def is_final(self) -> bool:
        """Whether the failure is final: the missing episodes are not tried again."""
        return self.failure is not None and self._retry_at == math.inf

    def write(self, episode: Episode) -> None:
        """Append an episode, or hold it; does nothing after a final failure if none are held.

        Its attachments are written before it, so that a record never lacks one. The first failure
        is logged.
        """
        now = time.monotonic()
        if self.failure is not None:
            self._hold(episode)
            if now >= self._retry_at:
                self._retry(_RETRY_AT_ONCE)
            return
        failure = None
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            failure = self._look()
        failure = failure or self._append(episode)
        if failure is not None:
            self.failure = failure
            self._hold(episode)
            logger.warning("%s; the run continues", failure.message)

    def close(self) -> None:
        """Close the file, any number of times.

        The episodes that are held are tried once more; a failure is recorded.
        """
        if self._file.closed:
            return
        try:
            if self._retry_at < math.inf:
                self._retry()
            if self.failure is None:
                self.failure = self._look()
            self._file.close()
        except OSError as exc:
            self.failure = self.failure or self._failed(exc)
        finally:
            if self._lock is not None:
                self._lock.close()

    def _hold(self, episode: Episode) -> None:
        if self._is_retried:
            self.unwritten.append(episode)

    def _append(self, episode: Episode) -> ConfigError | None:
        """Write an episode; return why that failed."""
        self._retry_at = math.inf
        try:
            if self._attachments is not None:
                self._attachments.write(episode.contents)
            elif any(step.attachments for step in episode.steps):
                logger.warning(
                    "the attachments of episode %d are not written: %s is not a regular file",
                    episode.index,
                    self._path,
                )
            self._append_line(f"{episode.model_dump_json()}\n".encode())
            self._written += 1
        except OSError as exc:
            return self._look() or self._failed(exc)
        except ValueError as exc:  # JSON cannot represent a value
            return ConfigError(
                f"episode {episode.index} of task {episode.task_id!r} cannot be written to "
                f"{self._path}, which has {self._written} episodes: {exc}",
                hint="correct the task or the policy; episodes and summary() are complete",
            )
        return None

    def _append_line(self, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: It cannot be written; no part of it is left, unless `_is_torn`.
        """
        done, descriptor = 0, self._file.fileno()
        try:
            while done < len(line):
                done += os.write(descriptor, line[done:])
        except OSError:
            if done:
                self._is_torn = True
                if self._is_regular:
                    self._file.truncate(os.fstat(descriptor).st_size - done)
                    self._is_torn = False
            raise

    def _retry(self, most: int | None = None) -> None:
        """Write the episodes that are held, until one fails.

        Args:
            most: Write up to this many, and the others with the next episode. None: all.
        """
        done, failure = 0, self._look()
        for episode in () if failure else self.unwritten[:most]:
            failure = self._append(episode)
            if failure is not None:
                break
            episode.contents.clear()
            done += 1
        self.unwritten = self.unwritten[done:]
        if self.unwritten:
            self.failure = failure or self.failure
            if failure is None:
                self._retry_at = -math.inf
            return
        self.failure = None
        logger.warning("%s can be written again; no episode is missing", self._path)

    def _failed(self, exc: OSError) -> ConfigError:
        if self._is_retried and self._is_regular and not self._is_torn:
            self._retry_at = time.monotonic() + _RETRY_EVERY_S
        return ConfigError(
            f"{self._path} cannot be written: {exc.strerror}; it has {self._written} episodes",
            hint="free space or choose another file; episodes and summary() are complete",
        )

    def _look(self) -> ConfigError | None:
        """Return an error if the file is gone: a file without a name takes whatever is written."""
        if not self._is_regular:
            return None
        try:
            found = self._place.stat()
            self.is_gone = self._has_number and not os.path.samestat(
                os.fstat(self._file.fileno()), found
            )
        except (FileNotFoundError, NotADirectoryError):
            self.is_gone = True
        except OSError:  # it may be there
            return None
        if not self.is_gone:
            return None
        self._retry_at = math.inf
        return gone(self._path, self._written + self._gone_earlier())


def gone(path: Path, count: int) -> ConfigError:
    """Return the error for an output that others removed.

    Args:
        path: Its path.
        count: The number of episodes that were in it.
    """
    return ConfigError(
        f"{path} was removed, moved or replaced while it was written: {count} episodes that were "
        "in it are missing",
        hint="put it back, and continue with resume=True; summary() is complete",
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
        if self._is_regular:
            try:
                self._lock = OutputLock.acquire(path)
                self._continue()
            except BaseException:
                self.close()
                raise

    def _continue(self) -> None:
        try:
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
                    self._append_line(b"\n")
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
