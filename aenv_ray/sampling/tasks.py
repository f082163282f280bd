"""Sources of tasks: a file or list, read at once, or an iterator, read as episodes start."""

from __future__ import annotations

import asyncio
import json
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
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from pydantic import ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.user_code import call, hand_over, outcome
from aenv_ray.trajectories.files import of_another_run
from aenv_ray.trajectories.schema import Task

TaskObjects = Iterable[Task | Mapping[str, Any]]
TaskSource = str | Path | TaskObjects | AsyncIterable[Task | Mapping[str, Any]]
"""Path of a JSON Lines file, or `Task` objects, or mappings with their fields."""

_END: Final = object()


def load_tasks(source: str | Path | TaskObjects) -> list[Task]:
    """Return all tasks of a JSON Lines file or of objects.

    Raises:
        ConfigError: The file cannot be read, or a task is invalid; the message names the line.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"task file {path} cannot be read: {exc}") from exc
        numbered = [(f"{path}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
        return [_task(where, _parse(where, line)) for where, line in numbered]
    return [_task(f"task {n}", task) for n, task in enumerate(source)]


def _parse(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as exc:
        raise ConfigError(f"{where}: {exc}") from None


def _task(where: str, data: Any) -> Task:
    if isinstance(data, Task):
        return data
    try:
        return Task.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(
            ": ".join([where, *filter(None, [".".join(map(str, first["loc"]))]), first["msg"]]),
            hint='a task is {"id": …, "instruction": …, "setup": …, "reward": …}',
        ) from None


class TaskFeed:
    """Numbers tasks from 0, and reads each one when it is taken.

    Nothing is read ahead, so a source may be slow or endless. A file or list is read and checked at
    once. An iterator may block, so it is read in a separate thread, always the same; an async
    iterator is read on the loop of its consumers. Consumers may take tasks concurrently.

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
        if isinstance(source, str | Path | Sequence | Set | Mapping):
            self.known = load_tasks(source)
            self._reader = _Direct(self.known)
        elif isinstance(source, AsyncIterable):
            self._reader = _Async(source)
        elif isinstance(source, Iterable):
            self._reader = _Threaded(source)
        else:
            raise ConfigError(
                f"tasks {source!r} are neither a file nor iterable",
                hint="give a JSON Lines file, a list, an iterator or an async iterator",
            )
        sized = source if self.known is None else self.known
        self.total = len(sized) if isinstance(sized, Sized) else None
        """The number of tasks; None if the source has no length."""

    async def take(self) -> tuple[int, Task] | None:
        """Return the next task and its number; None if there are no more, or the source failed."""
        async with self._taking:
            return self._ahead.popleft() if self._ahead else await self._read()

    async def skip(self, kept: Mapping[int, str], where: str, partly: Container[int] = ()) -> None:
        """Skip tasks that an earlier run finished.

        Args:
            kept: Their numbers and ids.
            where: The file of that run, for messages.
            partly: Those of them that are taken again, because samples of them are missing.

        Raises:
            ConfigError: The tasks differ from those of that run.
        """
        left = dict(kept)
        while left and (taken := await self._read()) is not None:
            number, task = taken
            finished = left.pop(number, None)
            if finished is None:
                self._ahead.append(taken)
            elif finished != task.id:
                raise of_another_run(where, number, finished)
            elif number in partly:
                self._ahead.append(taken)
        if self.failure is not None:
            raise self.failure
        for number, finished in left.items():
            raise of_another_run(where, number, finished)

    async def _read(self) -> tuple[int, Task] | None:
        if self._is_at_end:
            return None
        try:
            found = await self._reader.read()
            if found is not _END:
                task = _task(f"task {self._number}", found)
                self._number += 1
                return self._number - 1, task
        except Exception as exc:  # noqa: BLE001  # the caller's iterator may raise anything
            self.failure = exc
        self.close()
        return None

    def close(self) -> None:
        """Stop reading, any number of times. The source itself is not closed."""
        self._is_at_end = True
        self._reader.close()


class _Direct:
    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = iter(tasks)

    async def read(self) -> Any:
        return next(self._tasks, _END)

    def close(self) -> None:
        """Do nothing."""


class _Async:
    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._source = source
        self._iterator: AsyncIterator[Any] | None = None

    async def read(self) -> Any:
        if self._iterator is None:
            self._iterator = aiter(self._source)
        return await outcome(_next_of(self._iterator), "the tasks")

    def close(self) -> None:
        """Do nothing."""


async def _next_of(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


class _Threaded:
    """Reads in a daemon thread, so that a blocking iterator cannot block the end of the process."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._asked: SimpleQueue[asyncio.Future[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def read(self) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="aenv-tasks", daemon=True)
            self._thread.start()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.put(answer)
        return await answer

    def close(self) -> None:
        self._asked.put(None)

    def _serve(self) -> None:
        iterator: Iterator[Any] | None = None

        def read() -> Any:
            nonlocal iterator
            if iterator is None:
                iterator = iter(self._source)
            return next(iterator, _END)

        while (answer := self._asked.get()) is not None:
            hand_over(answer, *call(read, "the tasks"))
