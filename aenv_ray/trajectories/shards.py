"""A directory of shards: each writer has its own files, and one manifest lists them all.

Writers are independent of each other, so the processes of a trainer can write into one directory. A
sampling has one writer, in the process that called `sample`: a lost runner or node takes no record
with it, and nodes need not share the directory. An unfinished shard is JSON Lines in either format,
so a crash loses at most one incomplete line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.trajectories import arrow
from aenv_ray.trajectories.attachments import AttachmentFiles
from aenv_ray.trajectories.files import (
    ContinuedFile,
    EpisodeFile,
    count_lines,
    gone,
    read_lines,
)
from aenv_ray.trajectories.output_lock import LOCK_NAME, OutputLock
from aenv_ray.trajectories.schema import SCHEMA_VERSION, Episode, check_version

MANIFEST: Final = "manifest.json"
EPISODES_PER_SHARD: Final = 1000
logger = logging.getLogger("aenv_ray")
EPISODES_PER_PROCESS: Final = 1_000_000_000
"""Distance between the first indices of processes that write into one directory."""
_BEGINNING: Final = b'{"index":'
"""How the line of an episode begins."""
_SHARD = re.compile(r"[\w.-]+-\d{5}\.(jsonl|parquet)")


class ShardFormat(StrEnum):
    """The format of finished shards."""

    JSONL = "jsonl"
    """JSON Lines."""
    PARQUET = "parquet"
    """Parquet, compressed with zstd."""


class Shard(BaseModel):
    """One file of a directory, as the manifest lists it."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Relative to the directory."""
    episodes: int
    size_bytes: int
    digest: str
    """``sha256:`` and the hexadecimal digest of the file."""


class Manifest(BaseModel):
    """What a directory of shards contains."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA_VERSION
    shards: tuple[Shard, ...] = ()


class EpisodeOutput(Protocol):
    """Where finished episodes are written."""

    @property
    def failure(self) -> ConfigError | None:
        """Why episodes are missing in the output at present; None if none are."""

    @property
    def unwritten(self) -> list[Episode]:
        """Episodes that are missing in the output, and that it holds, with their attachments."""

    @property
    def is_final(self) -> bool:
        """Whether the failure is final: the missing episodes are not tried again."""

    @property
    def is_gone(self) -> bool:
        """Whether what was written was removed, moved or replaced by others."""

    def write(self, episode: Episode) -> None:
        """Append an episode; see `EpisodeFile.write`."""

    def close(self) -> None:
        """Finish the output, any number of times."""


class ShardWriter:
    """Writes the episodes of one writer into shards of a directory.

    Args:
        directory: Made if missing.
        writer: Name of the writer, unique among the writers of the directory at one time; shards
            that it wrote earlier are kept, and converted if it was killed before that.
        form: Format of the finished shards.
        episodes_per_shard: Episodes in a full shard.
        is_new: Whether the name must be new: the first shard is created at once, by this writer
            alone.
        is_retried: See `EpisodeFile`.
        kept: The number of episodes that the directory has, for messages.

    Raises:
        ConfigError: The directory cannot be written, or Parquet support is missing.
        FileExistsError: The name is to be new, and another writer has it.
    """

    def __init__(
        self,
        directory: Path,
        writer: str,
        *,
        form: ShardFormat = ShardFormat.JSONL,
        episodes_per_shard: int = EPISODES_PER_SHARD,
        is_new: bool = False,
        is_retried: bool = False,
        kept: int = 0,
    ) -> None:
        self.failure: ConfigError | None = None
        """Why episodes are missing in the directory at present; None if none are."""
        self._directory = directory.absolute()  # the policy may change the working directory
        self._writer = writer
        self._form = form
        self._attachments = AttachmentFiles(self._directory, is_directory=True)
        self._most = episodes_per_shard
        self._is_retried = is_retried
        self._kept = kept
        self._number = 0
        self._count = 0
        self._file: EpisodeFile | None = None
        self._finished: dict[int, int] = {}
        """The number of episodes in each finished shard."""
        self._unopened: list[Episode] = []
        """Episodes that are held because no shard could be opened for them."""
        if form is ShardFormat.PARQUET:
            arrow.pyarrow()
        make_directory(directory)
        if is_new:
            self._claim()
        elif form is ShardFormat.PARQUET:
            self._convert_earlier()

    @property
    def unwritten(self) -> list[Episode]:
        """The missing episodes, in order, if they are held."""
        return self._unopened if self._file is None else self._file.unwritten

    @property
    def is_final(self) -> bool:
        """Whether the failure is final: the missing episodes are not tried again."""
        return self.failure is not None if self._file is None else self._file.is_final

    @property
    def is_gone(self) -> bool:
        """Whether all shards of this writer were removed, moved or replaced by others."""
        is_open_gone = self._file is None or self._file.is_gone
        has_written = self._file is not None or bool(self._finished)
        return has_written and is_open_gone and not any(map(self._has_shard, self._finished))

    def write(self, episode: Episode) -> None:
        """Append an episode; see `EpisodeFile.write`."""
        if self._file is None:
            if self.failure is None:
                self._open()
            if self._file is None:
                if self._is_retried:
                    self._unopened.append(episode)
                return
        self._file.write(episode)
        self._count += 1
        self.failure = self._file.failure
        if self._count >= self._most and self.failure is None:
            self._finish()

    def close(self) -> None:
        """Finish the last shard, any number of times; a failing flush is recorded as a failure."""
        self._finish()
        count = self._gone_earlier()
        if count and self.failure is None:
            self.failure = gone(self._directory, count)

    def _claim(self) -> None:
        """Create the first shard.

        Raises:
            FileExistsError: There is one.
        """
        path = self._path(ShardFormat.JSONL)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be created: {exc.strerror}", hint="choose another directory"
            ) from exc
        if self._path(ShardFormat.PARQUET).exists():  # its writer has converted it meanwhile
            path.unlink()
            raise FileExistsError(path)
        self._file = self._shard_file()

    def _open(self) -> None:
        """Open the next shard; a failure is final and logged."""
        while self._has_shard(self._number) or self._number in self._finished:
            self._number += 1
        try:
            self._file = self._shard_file()
        except ConfigError as exc:
            count = self._gone_earlier()
            self.failure = gone(self._directory, count) if count else exc
            logger.warning("%s; the run continues", self.failure.message)

    def _shard_file(self) -> EpisodeFile:
        return EpisodeFile(
            self._path(ShardFormat.JSONL),
            attachments=self._attachments,
            is_retried=self._is_retried,
            gone_earlier=self._gone_earlier,
        )

    def _gone_earlier(self) -> int:
        """Return how many episodes of finished shards others have removed."""
        count = sum(n for number, n in self._finished.items() if not self._has_shard(number))
        return count + (0 if self._directory.exists() else self._kept)

    def _has_shard(self, number: int) -> bool:
        return any(self._path(form, number).exists() for form in ShardFormat)

    def _path(self, form: ShardFormat, number: int | None = None) -> Path:
        number = self._number if number is None else number
        return self._directory / f"{self._writer}-{number:05}.{form}"

    def _finish(self) -> None:
        """Finish the open shard, unless episodes are missing in it."""
        if self._file is None:
            return
        self._file.close()
        self.failure = self._file.failure
        if self.failure is None:
            self._finished[self._number] = self._count
            self._file, self._count = None, 0
            if self._form is ShardFormat.PARQUET:
                _convert(self._path(ShardFormat.JSONL))

    def _convert_earlier(self) -> None:
        """Convert the shards that an earlier writer of this name left in JSON Lines."""
        name = re.compile(rf"{re.escape(self._writer)}-\d{{5}}\.jsonl")
        left = [path for path in _named_as_shards(self._directory) if name.fullmatch(path.name)]
        if left:
            try:
                (self._directory / MANIFEST).unlink(missing_ok=True)  # it may list them
            except OSError as exc:
                raise ConfigError(
                    f"{self._directory} cannot be written: {exc.strerror}",
                    hint="choose another directory",
                ) from exc
        for path in sorted(left):
            _convert(path)


def _convert(lines: Path) -> None:
    """Replace a finished shard of JSON Lines, which stays, with a warning, if that fails."""
    parquet, partial = lines.with_suffix(".parquet"), lines.with_suffix(".partial")
    try:
        found = read_lines(lines)
        arrow.write_parquet(found.episodes, partial, mode=lines.stat().st_mode & 0o777)
        partial.replace(parquet)
        lines.unlink()
    except (OSError, ConfigError) as exc:
        partial.unlink(missing_ok=True)
        logger.warning(
            "%s stays JSON Lines, which `aenv_ray.trajectories.read` reads and Parquet readers do "
            "not: %s", lines, exc,
        )  # fmt: skip
        return
    if found.is_torn:
        logger.warning("%s: the last line is incomplete and is skipped", lines)


def make_directory(directory: Path) -> None:
    """Make the directory of shards if it is missing.

    Raises:
        ConfigError: The directory cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"{directory} cannot be created: {exc.strerror}", hint="choose another directory"
        ) from exc


def shard_files(directory: Path) -> list[Path]:
    """Return the shards of a directory, sorted.

    A shard that was being converted to Parquet when its writer died counts once.

    Raises:
        ConfigError: The directory cannot be read.
    """
    found = _named_as_shards(directory)
    both = {path for path in found if path.suffix == ".jsonl"}
    return sorted(found - {path for path in both if path.with_suffix(".parquet") in found})


def _named_as_shards(directory: Path) -> set[Path]:
    try:
        return {path for path in directory.iterdir() if _SHARD.fullmatch(path.name)}
    except OSError as exc:
        raise _unreadable(directory, exc) from exc


def _unreadable(path: Path, cause: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {cause.strerror}", hint="check the path and its permissions"
    )


def writer_of(path: Path) -> str:
    """Return the name of the writer of a shard; that of the file itself if it is not a shard."""
    return path.stem.rpartition("-")[0] if _SHARD.fullmatch(path.name) else path.name


def load_shard(path: Path) -> list[Episode]:
    """Return the episodes of one shard.

    Raises:
        ConfigError: It cannot be read.
    """
    return arrow.read_parquet(path) if path.suffix == ".parquet" else read_lines(path).episodes


def write_manifest(directory: Path) -> Manifest:
    """List the shards of all writers, and write the manifest. Call it when they have closed.

    Raises:
        ConfigError: A shard cannot be read, or the manifest cannot be written.
    """
    manifest = Manifest(shards=tuple(_shard(path) for path in shard_files(directory)))
    text = manifest.model_dump_json(indent=2) + "\n"
    try:
        write_atomically(directory / MANIFEST, text, mode=0o644, durable=True)
    except OSError as exc:
        raise ConfigError(
            f"{directory / MANIFEST} cannot be written: {exc.strerror}",
            hint="make room on the disk, or make the directory writable, and try again",
        ) from exc
    return manifest


def _shard(path: Path) -> Shard:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = path.stat().st_size
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return Shard(
        path=path.name,
        episodes=_count(path),
        size_bytes=size_bytes,
        digest=f"sha256:{digest}",
    )


def _count(path: Path) -> int:
    return arrow.count_rows(path) if path.suffix == ".parquet" else count_lines(path)


def check_manifest(directory: Path) -> None:
    """Check that the listed shards are there and have their size; later shards are not listed.

    Raises:
        ConfigError: A shard is missing or has changed, the manifest cannot be read, or the shards
            are of a newer version of the schema.
    """
    path = directory / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # the run was interrupted, or still runs
    except (OSError, UnicodeDecodeError, ValidationError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}",
            hint="delete it to read the directory without checking its shards",
        ) from exc
    check_version(manifest.schema_version, str(path))
    for shard in manifest.shards:
        file = directory / shard.path
        size = file.stat().st_size if file.is_file() else None
        if size != shard.size_bytes:
            what = "is missing" if size is None else f"has {size} bytes"
            raise ConfigError(
                f"{file} {what}; the manifest lists it with {shard.size_bytes} bytes",
                hint=f"restore it, or delete {path} to read the shards that are there",
            )


def state_of(path: Path) -> frozenset[tuple[str, int, int]]:
    """Return the name, size and time of change of each file of episodes in an output.

    Two states differ if the output was written to in between.

    Raises:
        ConfigError: The output cannot be read.
    """
    files = _named_as_shards(path) if _is_dir(path) else {path}
    found = set()
    for file in files:
        try:
            status = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            raise _unreadable(file, exc) from exc
        if status.st_size and stat.S_ISREG(status.st_mode):
            found.add((file.name, status.st_size, status.st_mtime_ns))
    return frozenset(found)


def clear(directory: Path) -> None:
    """Delete the shards, the manifest and the attachments of a directory, and nothing else in it.

    Attachments are left if other files are in the directory: they may be records that have them.

    Raises:
        ConfigError: They cannot be deleted, or a file that is named like them is something else;
            then all are left.
    """
    ours = _replaced(directory)
    if not ours:
        return
    for path in ours:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be replaced: {exc.strerror}", hint="choose another directory"
            ) from exc
    try:
        if not any(path.is_file() and path.name != LOCK_NAME for path in directory.iterdir()):
            AttachmentFiles(directory, is_directory=True).clear()
    except OSError as exc:
        raise ConfigError(
            f"the attachments in {directory} cannot be replaced: {exc.strerror}",
            hint="choose another directory",
        ) from exc


def _replaced(path: Path) -> list[Path]:
    """Return the files of an output that a new run replaces.

    Raises:
        ConfigError: One of them is something else.
    """
    if _is_dir(path):
        manifest = path / MANIFEST
        shards = sorted(_named_as_shards(path))
        found = [*shards, *([manifest] if manifest.exists() else [])]
    else:
        _check_suffix(path)
        found = [path] if _is_file(path) else []  # there is nothing to replace in a device
    for one in found:
        if not _is_ours(one):
            raise ConfigError(
                f"{one} would be replaced, but is not a file of episodes",
                hint=f"choose another path than {path}",
            )
    return found


def _check_suffix(path: Path) -> None:
    """Check that JSON Lines are not written into a file that is named as Parquet.

    Raises:
        ConfigError: They would be.
    """
    if path.suffix == ".parquet" and _is_file(path):
        raise ConfigError(
            f"{path} is a file, but Parquet output is a directory of shards",
            hint="choose a new path, or a directory",
        )


def _is_ours(path: Path) -> bool:
    """Whether a file is empty, or what it begins with is what a run writes."""
    try:
        if path.suffix == ".parquet":
            return arrow.has_episodes(path)
        with path.open("rb") as file:
            if path.name == MANIFEST:
                content = json.load(file)
                return isinstance(content, dict) and Manifest.model_fields.keys() <= content.keys()
            start = file.read(1)
            if start != b"{":  # its first line may be as long as the file
                return not start
            line = start + file.readline()
        begins = _BEGINNING.startswith(line) or re.match(_BEGINNING + rb"\d+(,|\Z)", line)
        is_torn = begins and not line.endswith(b"\n")  # its writer was killed
        return bool(is_torn) or Episode.model_validate_json(line) is not None
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    except (ValueError, RecursionError):  # also a ValidationError
        return False


def is_directory(path: Path) -> bool:
    """Return whether an output path means a directory of shards.

    It does if it is a directory, or is new and has no suffix or the suffix ``.parquet``.
    """
    is_new = not os.path.exists(path)
    return _is_dir(path) or (is_new and path.suffix in ("", ".parquet"))


def _is_dir(path: Path) -> bool:
    """As `Path.is_dir`; False if that cannot be found out, as for a name that is too long."""
    return os.path.isdir(path)


def _is_file(path: Path) -> bool:
    """As `Path.is_file`; see `_is_dir`."""
    return os.path.isfile(path)


def check_output(
    path: Path,
    *,
    overwrite: bool,
    hint: str = "continue with resume=True, replace them with overwrite=True, or choose another "
    "path",
) -> None:
    """Check that a new run may write to an output path, before anything runs.

    Args:
        path: As for `open_output`.
        overwrite: Whether the episodes that it has are replaced.
        hint: What to do if it has episodes that are not to be replaced.

    Raises:
        ConfigError: It has episodes and `overwrite` is false, or other content.
    """
    _replaced(path)
    if not overwrite and state_of(path):
        raise ConfigError(f"{path} already has episodes", hint=hint)


def open_output(
    path: Path,
    kept: Iterable[Episode] = (),
    expected: frozenset[tuple[str, int, int]] | None = None,
    *,
    lock: OutputLock | None = None,
) -> EpisodeOutput:
    """Open the output of a run: a file of JSON Lines, or a directory of shards.

    It is locked until it is closed. Episodes that cannot be written are held and tried again.

    Args:
        path: A file is one JSON Lines file. A directory, or a new path without suffix, has shards
            of JSON Lines; with the suffix ``.parquet``, shards of Parquet.
        kept: Episodes of an earlier run to continue; without them, its output is replaced.
        expected: What `state_of` returned before the output was read. None: its state does not
            matter.
        lock: What `lock_output` returned. It is closed with the output, and if this raises. None:
            the output is locked here, which may block for 2 s.

    Raises:
        ConfigError: The output cannot be opened, another run writes to it or has written to it,
            or what it would replace is not of episodes.
    """
    kept = tuple(kept)
    has_shards = is_directory(path)
    if lock is None and _is_made(path):
        lock = OutputLock.acquire(path)
    try:
        if expected is not None and state_of(path) != expected:
            raise ConfigError(
                f"{path} has changed since it was read: another run has written to it",
                hint="call sample() again, with resume=True to continue that run",
            )
        if has_shards:
            if not kept:
                clear(path)
            return DirectoryOutput(path, lock, len(kept))
        if not kept:
            _replaced(path)
        return EpisodeFile(path, kept, lock=lock, is_retried=True)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


async def lock_output(path: Path) -> OutputLock | None:
    """Create an output if it is missing, and lock it; None for what is not a regular file.

    A run of this process that was left, for example by ``break``, is given some time to end.

    Args:
        path: As for `open_output`.

    Raises:
        ConfigError: It cannot be created, or another run writes to it.
    """
    return await OutputLock.acquire_async(path) if _is_made(path) else None


def _is_made(path: Path) -> bool:
    """Create an output if it is missing; return whether it can be locked.

    Raises:
        ConfigError: It cannot be created.
    """
    if is_directory(path):
        make_directory(path)
        return True
    try:
        if path.exists():
            return path.is_file()
        path.touch()
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}", hint="choose another file"
        ) from exc
    return True


def continue_output(path: Path) -> tuple[EpisodeOutput, int]:
    """Open an output for episodes that are added to those of other processes; nothing is replaced.

    Args:
        path: As for `open_output`. A file is continued, by one process at a time. In a directory,
            any number of processes have shards of their own; they write no manifest, since others
            may still be writing.

    Returns:
        The output, and the index of the first episode. The next ones are counted from there, and
        no other process uses their indices.

    Raises:
        ConfigError: The output cannot be opened, or is a file that is not of episodes or that
            another process writes to.
    """
    if not is_directory(path):
        _check_suffix(path)
        if _is_file(path) and not _is_ours(path):
            raise ConfigError(
                f"{path} would be continued, but is not a file of episodes",
                hint="choose another path",
            )
        file = ContinuedFile(path)
        return file, file.next_index
    make_directory(path)
    used = {writer_of(one) for one in _named_as_shards(path)}
    number = 1 if used else 0
    while True:
        name = f"process{number}"
        if name not in used:
            with contextlib.suppress(FileExistsError):
                writer = ShardWriter(path, name, form=_form_of(path), is_new=True)
                return writer, number * EPISODES_PER_PROCESS
        number += 1


def _form_of(directory: Path) -> ShardFormat:
    return ShardFormat.PARQUET if directory.suffix == ".parquet" else ShardFormat.JSONL


class DirectoryOutput:
    """The shards of a run with a single writer, and their manifest.

    Args:
        directory: Made if missing.
        lock: The lock on the directory; it is closed with the output.
        kept: The number of episodes that the directory has.

    Raises:
        ConfigError: The directory cannot be written, or Parquet support is missing.
    """

    def __init__(self, directory: Path, lock: OutputLock | None, kept: int) -> None:
        self._directory = directory.absolute()
        self._lock = lock
        self._writer = ShardWriter(
            directory, "driver", form=_form_of(directory), is_retried=True, kept=kept
        )
        self._manifest_failure: ConfigError | None = None
        self._is_closed = False

    @property
    def failure(self) -> ConfigError | None:
        """Why episodes are missing in the directory at present, or why it has no manifest."""
        return self._writer.failure or self._manifest_failure

    @property
    def unwritten(self) -> list[Episode]:
        """The missing episodes, in order."""
        return self._writer.unwritten

    @property
    def is_final(self) -> bool:
        """Whether the failure is final: the missing episodes are not tried again."""
        return self._writer.is_final

    @property
    def is_gone(self) -> bool:
        """Whether all shards were removed, moved or replaced by others."""
        return self._writer.is_gone

    def write(self, episode: Episode) -> None:
        """Append an episode; see `EpisodeFile.write`."""
        self._writer.write(episode)

    def close(self) -> None:
        """Finish the last shard and write the manifest, any number of times."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._writer.close()
            if not self.is_gone:
                write_manifest(self._directory)
        except ConfigError as exc:
            self._manifest_failure = exc
        finally:
            if self._lock is not None:
                self._lock.close()
