"""A dispatcher for tests, with functions that the test registers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher

WAIT_S = 10.0


def start_past_the_factory(coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task on the running loop as aiohttp does on Python 3.12 and 3.13."""
    eager: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
    return asyncio.Task(coro, loop=asyncio.get_running_loop(), **eager)


def show_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tasks the method that they have from Python 3.12 on."""
    if sys.version_info >= (3, 12):
        return
    python_task: Any = vars(asyncio.tasks)["_PyTask"]

    class Task(python_task):  # type: ignore[misc]  # a class that typeshed does not have
        def get_context(self) -> Any:
            return self._context

    monkeypatch.setattr(asyncio, "Task", Task)


class Answer:
    """The outcome of one submitted call."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.times = 0
        self._outcome = b""

    def __call__(self, outcome: bytes) -> None:
        self.times += 1
        self._outcome = outcome
        self._told.set()

    def wait(self) -> dict[str, Any]:
        assert self._told.wait(WAIT_S), "no outcome"
        found: dict[str, Any] = json.loads(b"{" + self._outcome + b"}")
        return found

    @property
    def result(self) -> dict[str, Any]:
        answer = self.wait()
        assert "result" in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    @property
    def text(self) -> str:
        return str(self.result["content"][0]["text"])

    @property
    def error(self) -> dict[str, Any]:
        answer = self.wait()
        assert "error" in answer, answer
        found: dict[str, Any] = answer["error"]["data"]
        return found


class Bench:
    """A dispatcher and an environment that a test fills."""

    def __init__(self, *functions: Callable[..., Any], load_error: str | None = None) -> None:
        self.registry = Registry()
        for function in functions:
            self.registry.add_tool(function)
        self.dispatcher = Dispatcher(self.registry, load_error=load_error)

    def submit(self, method: str, params: dict[str, Any]) -> Answer:
        answer = Answer()
        self.dispatcher.submit(method, params, answer)
        return answer

    def tool(self, name: str, _meta: dict[str, Any] | None = None, /, **arguments: Any) -> Answer:
        params = {"name": name, "arguments": arguments, "_meta": _meta or {}}
        return self.submit("tools/call", params)

    def in_thread(self, method: str, params: dict[str, Any]) -> Answer:
        """Submit from another thread, as a door does: a sync function runs in it."""
        answer = Answer()
        arguments = (method, params, answer)
        threading.Thread(target=self.dispatcher.submit, args=arguments, daemon=True).start()
        return answer


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_later(a: int, b: int = 1) -> int:
    await asyncio.sleep(0)
    return a + b


def fail(text: str = "boom") -> None:
    raise ValueError(text)


def lambda_named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def spin() -> None:
    while True:
        pass
