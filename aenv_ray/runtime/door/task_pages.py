"""Lists the environment's tasks in pages, so that there may be any number of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from aenv_ray.runtime.api.registry import Registered, Registry
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.faults import Fault

MAX_TASKS: Final = 10_000
"""Tasks in one page."""
MAX_BYTES: Final = 8 * 1024 * 1024
"""JSON of a page; one that is reached ends the page early."""


class TaskPages:
    """Pages of what the function of `register_tasks` yields. Thread-safe.

    A page that follows the last one continues the same iterator; any other begins a new one. The
    function must yield the same tasks each time.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._tasks: Iterator[Any] = iter(())
        self._position = -1
        """How many tasks the iterator has yielded; negative before the first page."""

    def entry(self) -> Registered:
        """Return what the door calls.

        Raises:
            Fault: ``tool_not_found``: the environment brings no tasks.
        """
        tasks = self._registry.tasks
        if tasks is None:
            raise Fault(
                "tool_not_found",
                self._registry.absence or "the environment brings no tasks",
                "decorate a function with @register_tasks, or give the sampler tasks",
            )
        return Registered(tasks.name, self.page, "builtin", timeout_s=tasks.timeout_s)

    def page(self, offset: int = 0, limit: int = 1000) -> dict[str, Any]:
        """Return a page.

        Args:
            offset: Number of the first task, from 0.
            limit: Maximum number of tasks, from 1 to `MAX_TASKS`; a page of large tasks has fewer.

        Returns:
            ``tasks``, and ``next``: the offset of the next page, or None after the last task.

        Raises:
            Fault: ``tool_input_invalid``: a number is out of range. ``function_failed``: a task is
                not a JSON object.
        """
        if offset < 0 or not 1 <= limit <= MAX_TASKS:
            raise Fault(
                "tool_input_invalid",
                f"offset {offset} and limit {limit}: expected at least 0, and 1 to {MAX_TASKS}",
            )
        with self._lock:
            try:
                return self._page(offset, limit)
            except BaseException:
                self._position = -1  # an iterator that raised yields nothing more
                raise

    def _page(self, offset: int, limit: int) -> dict[str, Any]:
        if offset != self._position:
            self._tasks = iter(self._all())
            skipped = itertools.islice(self._tasks, offset)
            self._position = sum(1 for _ in skipped)
        tasks: list[Any] = []
        size = 0
        for task in self._tasks:
            self._position += 1
            tasks.append(self._object(task))
            size += len(to_json(tasks[-1]))
            if len(tasks) == limit or size >= MAX_BYTES:
                return {"tasks": tasks, "next": self._position}
        self._position = -1
        return {"tasks": tasks, "next": None}

    def _all(self) -> Any:
        assert self._registry.tasks is not None  # `entry` has checked it
        return self._registry.tasks.function()

    def _object(self, task: Any) -> dict[str, Any]:
        if isinstance(task, BaseModel):
            task = task.model_dump(mode="json")
        if isinstance(task, dict):
            return task
        raise Fault(
            "function_failed",
            f"task {self._position - 1} is a {type(task).__name__}, not a mapping",
            "yield dictionaries or pydantic models",
        )
