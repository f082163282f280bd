"""A sequence of task directories."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, overload

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.sampling.tasks.directories import harbor, terminal_bench
from aenv_ray.sampling.tasks.directories.fields import FormatOptions
from aenv_ray.trajectories.schema import Task

DEEPEST: Final = 3
"""Tasks are found this many levels below the directory that is given."""


@dataclass(frozen=True)
class TaskDirectory:
    """A directory with a task that has not been read yet."""

    id: str
    path: Path
    root: Path
    """What it was found below; its task names no files elsewhere."""

    def load(self, options: FormatOptions) -> Task:
        """Read the task; blocks.

        Returns:
            A task that cannot be played if it is malformed, or names files of this machine
            elsewhere; the reason names the file and the field, or at least the directory.
        """
        is_harbor = (self.path / harbor.FILE).is_file()
        read = harbor.load if is_harbor else terminal_bench.load
        hint = "replace symbolic links that lead out of it by the files, if you trust them"
        try:
            task = read(self.path, self.id, options)
            check_files([task], str(self.path), [self.root, self.path], hint=hint)
        except ConfigError as exc:
            why = f"the task is malformed: {exc.message}"
            return Task(id=self.id, reward=None, unsupported=f"{why} ({exc.hint})")
        except Exception as exc:  # noqa: BLE001  # one directory must not end a run of thousands
            why = f"the task is malformed: {self.path}: {type(exc).__name__}: {exc}"
            return Task(id=self.id, reward=None, unsupported=f"{why} (correct its files)")
        return task


class TaskDirectories(Sequence[Task]):
    """The tasks below a directory, by name; each is read when it is accessed.

    Args:
        entries: The directories.
        options: How they are read.
    """

    def __init__(self, entries: Sequence[TaskDirectory], options: FormatOptions) -> None:
        self.entries = tuple(entries)
        self._options = options

    @classmethod
    def below(cls, root: Path, options: FormatOptions) -> TaskDirectories:
        """Return the tasks of a directory, which may itself be one.

        Raises:
            ConfigError: There is none, or the directory cannot be read.
        """
        try:
            found = sorted(_task_directories(root, DEEPEST))
        except OSError as exc:
            raise ConfigError(
                f"tasks cannot be read: {exc}",
                hint="make the directory and those below it readable",
            ) from exc
        if not found:
            raise ConfigError(
                f"{root} holds no tasks",
                hint=f"give a directory of directories with a {harbor.FILE} (Harbor) or a "
                f"{terminal_bench.FILE} (Terminal-Bench 1)",
            )
        names = [path.relative_to(root).as_posix() for path in found]
        entries = [
            TaskDirectory(root.resolve().name if name == "." else name, path.resolve(), root)
            for name, path in zip(names, found, strict=True)
        ]
        return cls(entries, options)

    def of(self, entries: Sequence[TaskDirectory]) -> TaskDirectories:
        """Return some of these tasks."""
        return TaskDirectories(entries, self._options)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskDirectories: ...
    def __getitem__(self, index: int | slice) -> Task | TaskDirectories:
        if isinstance(index, slice):
            return self.of(self.entries[index])
        return self.entries[index].load(self._options)


def _task_directories(root: Path, levels: int) -> Iterator[Path]:
    with os.scandir(root) as found:
        entries = list(found)
    if any(entry.name in (harbor.FILE, terminal_bench.FILE) for entry in entries):
        yield root
    elif levels:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _task_directories(Path(entry.path), levels - 1)
