"""Sources of tasks: a file or list, read at once, or an iterator, read as episodes start."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    Sized,
)
from fnmatch import fnmatchcase
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from aenv_ray.config import settings
from aenv_ray.errors import ConfigError
from aenv_ray.policy import policy_of
from aenv_ray.project.config import NetworkMode
from aenv_ray.sampling.resuming import check_same_task
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.sampling.tasks.code_problems import as_task
from aenv_ray.sampling.tasks.directories import TaskDirectories
from aenv_ray.sampling.tasks.directories.fields import FormatOptions
from aenv_ray.sampling.tasks.repositories import is_row, task_of
from aenv_ray.sampling.tasks.rows import (
    HUGGING_FACE,
    LocatedRow,
    file_rows,
    from_hugging_face,
    table_of,
)
from aenv_ray.sampling.user_code import call, hand_over, outcome
from aenv_ray.trajectories.files import of_another_run
from aenv_ray.trajectories.schema import Task
from aenv_ray.validation import problems_of

TaskObjects = Iterable[Task | Mapping[str, Any]]
TaskSource = str | Path | TaskObjects | AsyncIterable[Task | Mapping[str, Any]]
"""Path of a JSON Lines, JSON, CSV or Parquet file, or of a directory of task directories;
``hf:NAME:SPLIT``; `Task` objects, mappings with their fields, or a table: of pandas, Arrow, Hugging
Face `datasets` or Ray Data."""

ROW_NUMBER: Final = "#"
"""In place of a column: the number of the row."""
_END: Final = object()


def load_tasks(
    source: str | Path | TaskObjects, fields: Mapping[str, str] | None = None
) -> list[Task]:
    """Return all tasks of a file, a table or of objects.

    Args:
        source: See `TaskSource`. An iterator is read to its end.
        fields: Fields of tasks and the columns that hold them, where their names differ:
            ``{"id": "#", "instruction": "question"}``; `ROW_NUMBER` numbers the rows from 0.

    Raises:
        ConfigError: The file cannot be read, a package for it is missing, or a task is invalid; the
            message names the line. Or a row of a data set of the Hub names files of this machine.
    """
    rows = enumerate(task_rows(source))
    tasks = [checked_task(where, _renamed(data, fields or {}, n)) for n, (where, data) in rows]
    if isinstance(source, str) and source.startswith(HUGGING_FACE):
        hint = "look at the rows; if you trust them, store them in a file of yours"
        check_files(tasks, source, hint=hint)
    return tasks


def task_directories(source: object) -> TaskDirectories | None:
    """Return the tasks below a directory; each is read when it is accessed.

    Returns:
        None if the source is not a directory.

    Raises:
        ConfigError: There are none.
    """
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return None
    networks = policy_of(settings(), behind_gateway=False).networks
    may_use_internet = any(fnmatchcase(NetworkMode.INTERNET.value, one) for one in networks)
    return TaskDirectories.below(Path(source), FormatOptions(may_use_internet=may_use_internet))


def task_rows(source: str | Path | TaskObjects) -> Iterator[LocatedRow]:
    """Yield the rows of a source, with their places, as `checked_task` takes them.

    Raises:
        ConfigError: The source cannot be read, or a package for it is missing.
    """
    if isinstance(source, str) and source.startswith(HUGGING_FACE):
        source = from_hugging_face(source.removeprefix(HUGGING_FACE))
    directories = task_directories(source)
    if directories is not None:
        return ((str(source), task) for task in directories)
    if isinstance(source, str | Path):
        return file_rows(Path(source))
    table = table_of(source)
    rows = source if table is None else table
    return ((f"task {n}", task) for n, task in enumerate(rows))


def _renamed(data: Any, fields: Mapping[str, str], number: int) -> Any:
    """Return a row with the fields of tasks in place of its columns."""
    if not fields or not isinstance(data, Mapping):
        return data
    renamed = {name: value for name, value in data.items() if name not in fields.values()}
    for field, column in fields.items():
        if column == ROW_NUMBER:
            renamed[field] = str(number)
        elif column in data:
            value = data[column]
            renamed[field] = str(value) if field == "id" else value
    return renamed


def checked_task(where: str, data: Any) -> Task:
    """Return a row of a source as a task.

    Raises:
        ConfigError: It is none; the message begins with its place.
    """
    if is_row(data):
        return task_of(where, data)
    if isinstance(data, Task):
        return data
    if isinstance(data, Mapping) and "id" not in data:
        data = as_task(data, where) or data
    try:
        return Task.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        is_missing = first["loc"] == ("id",) and first["type"] == "missing"
        raise ConfigError(
            f"{where}: {problems_of(exc)}",
            hint="name the column of the ids with --task-field id=COLUMN, or number the tasks with "
            "--task-field id=#"
            if is_missing
            else 'a task is {"id": …, "instruction": …, "setup": …, "reward": …}',
        ) from None


class TaskFeed:
    """Numbers tasks from 0, and reads each one when it is taken.

    Nothing is read ahead, so a source may be slow or endless. A file or list is read and checked at
    once. An iterator may block, so it is read in a separate thread, always the same, and each task
    can be taken before the iterator is asked for the next; an async iterator is read on the loop of
    its consumers. Consumers may take tasks concurrently.

    Raises:
        ConfigError: The source cannot be iterated, the file cannot be read, or a task of a file or
            list is invalid.
    """

    def __init__(self, source: TaskSource) -> None:
        self.failure: Exception | None = None
        """The error that ended the source; None if there was none."""
        self.known: list[Task] | None = None
        """All tasks of a file or list; None for an iterator."""
        self._ahead: deque[tuple[int, Task]] = deque()
        self._number = 0
        self._taking = asyncio.Lock()
        self._is_at_end = False
        self._reader: _Direct | _Threaded | _Async
        table = None if isinstance(source, str) else table_of(source)
        source = source if table is None else table
        source = task_directories(source) or source
        if isinstance(source, TaskDirectories):
            self._reader = _Threaded(source)
        elif isinstance(source, str | Path | Sequence | Set | Mapping):
            self.known = load_tasks(source)
            self._reader = _Direct(self.known)
        elif isinstance(source, AsyncIterable):
            self._reader = _Async(source)
        elif isinstance(source, Iterable):
            self._reader = _Threaded(source)
        else:
            raise ConfigError(
                f"tasks {source!r} are neither a file nor iterable",
                hint="give a file, a list, a table, an iterator or an async iterator",
            )
        sized = source if self.known is None else self.known
        self.total = len(sized) if isinstance(sized, Sized) else None
        """The number of tasks; None if the source has no length."""

    async def take(self, most: int) -> list[tuple[int, Task]]:
        """Return the next tasks and their numbers; none if there are no more, or the source failed.

        Args:
            most: Return up to this many, as soon as there is one; at least 1.
        """
        async with self._taking:
            if self._ahead:
                count = min(most, len(self._ahead))
                return [self._ahead.popleft() for _ in range(count)]
            return await self._read(most)

    async def skip(
        self,
        kept: Mapping[int, str],
        where: str,
        partly: Container[int] = (),
        recorded: Mapping[int, Task] | None = None,
    ) -> None:
        """Skip tasks that an earlier run finished.

        Args:
            kept: Their numbers and ids.
            where: The file of that run, for messages.
            partly: The numbers among them that are taken again, because samples are missing.
            recorded: Those that were recorded whole.

        Raises:
            ConfigError: The tasks differ from those of that run.
        """
        left = dict(kept)
        while left and (found := await self._read(len(left))):
            for number, task in found:
                finished = left.pop(number, None)
                if finished is not None and finished != task.id:
                    raise of_another_run(where, number, finished)
                check_same_task(task, (recorded or {}).get(number), where)
                if finished is None or number in partly:
                    self._ahead.append((number, task))
        if self.failure is not None:
            raise self.failure
        for number, finished in left.items():
            raise of_another_run(where, number, finished)

    async def _read(self, most: int) -> list[tuple[int, Task]]:
        found: list[tuple[int, Task]] = []
        if self._is_at_end:
            return found
        try:
            for row in await self._reader.read(most):
                if row is _END:
                    break
                if isinstance(row, _Failure):
                    raise row.error
                found.append((self._number, checked_task(f"task {self._number}", row)))
                self._number += 1
            else:
                return found
        except Exception as exc:  # noqa: BLE001  # the caller's iterator may raise anything
            self.failure = exc
        self.close()
        return found

    def close(self) -> None:
        """Stop reading, any number of times. The source itself is not closed."""
        self._is_at_end = True
        self._reader.close()


class _Failure(NamedTuple):
    """Stands in place of a task: the error that the source raised."""

    error: Exception


class _Direct:
    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = iter(tasks)

    async def read(self, most: int) -> Sequence[Any]:
        return list(itertools.islice(self._tasks, most)) or [_END]

    def close(self) -> None:
        """Do nothing."""


class _Async:
    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._source = source
        self._iterator: AsyncIterator[Any] | None = None

    async def read(self, most: int) -> Sequence[Any]:
        del most  # read one at a time: each may take long
        if self._iterator is None:
            self._iterator = aiter(self._source)
        return [await outcome(_next_of(self._iterator), "the tasks")]

    def close(self) -> None:
        """Do nothing."""


async def _next_of(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


class _Threaded:
    """Reads in a daemon thread, so that a blocking iterator cannot block the end of the process.

    Rows that are found while the loop is busy are handed over together.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._owed = 0
        """Rows that the thread was asked for and that were not returned."""
        self._lock = threading.Lock()
        self._found: list[Any] = []
        self._news: asyncio.Future[Any] | None = None
        """Waits for the next row."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def read(self, most: int) -> Sequence[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="aenv-tasks", daemon=True)
            self._thread.start()
        if most > self._owed:
            self._asked.put(most - self._owed)
            self._owed = most
        with self._lock:
            news = None
            if not self._found:
                news = self._news = asyncio.get_running_loop().create_future()
        if news is not None:
            await news
        with self._lock:
            found, self._found = self._found[:most], self._found[most:]
        self._owed -= len(found)
        return found

    def close(self) -> None:
        self._is_closed = True
        self._asked.put(None)

    def _serve(self) -> None:
        iterator: Iterator[Any] | None = None

        def read() -> Any:
            nonlocal iterator
            if iterator is None:
                iterator = iter(self._source)
            return next(iterator, _END)

        while (count := self._asked.get()) is not None:
            for _ in range(count):
                row, error = call(read, "the tasks")
                with self._lock:
                    self._found.append(row if error is None else _Failure(error))
                    news, self._news = self._news, None
                if news is not None:
                    hand_over(news, None, None)
                if row is _END or error is not None or self._is_closed:
                    return
