"""`SyncEnvironment`: `Environment` for code without an event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from aenv_ray.client.environment import Environment
from aenv_ray.errors import ConfigError

T = TypeVar("T")


class SyncEnvironment:
    """`Environment` without ``await``: each method blocks, on a loop thread of its own.

    Takes the same arguments, and has the same methods. Usable from several threads.
    """

    def __init__(self, env_name: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="aenv-sync", daemon=True
        )
        self._thread.start()
        try:
            self._environment = self._wait(_construct(env_name, options))
        except BaseException:
            self._end_loop()
            raise

    @classmethod
    def attach(cls, instance_id: str, **options: Any) -> SyncEnvironment:
        """Return an environment on a live instance; leaving it releases the instance."""
        self = cls(instance_id.rpartition("-")[0], **options)
        try:
            self._environment = self._wait(Environment.attach(instance_id, **options))
        except BaseException:
            self._end_loop()
            raise
        return self

    def _wait(self, awaitable: Awaitable[T]) -> T:
        future = asyncio.run_coroutine_threadsafe(_result(awaitable), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller's thread cancels the call
            raise

    def _check_open(self) -> None:
        if self._loop.is_closed():
            raise ConfigError(
                f"this SyncEnvironment of {self._environment.env_name} was closed",
                hint="make a new one; after release() alone it can be used again",
            )

    def __enter__(self) -> SyncEnvironment:
        self._check_open()
        self._wait(self._environment.initialize())
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """End the instance. Any number of times."""
        if self._loop.is_closed():
            return
        self._wait(self._environment.release())

    def logs(self, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Yield what the instance printed; see `Environment.logs`."""
        self._check_open()
        pieces = self._environment.logs(follow=follow, tail=tail)
        try:
            while (piece := self._wait(anext(pieces, None))) is not None:
                yield piece
        finally:
            self._wait(pieces.aclose())

    def close(self) -> None:
        """End the instance and the loop thread. Any number of times."""
        if self._loop.is_closed():
            return
        try:
            self.release()
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._environment, name)
        if not asyncio.iscoroutinefunction(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._check_open()
            return self._wait(attribute(*args, **kwargs))

        return call


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _construct(env_name: str, options: dict[str, Any]) -> Environment:
    return Environment(env_name, **options)
