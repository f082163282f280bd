"""`SyncEnvironment`: `Environment` for code without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from aenv_ray.client.environment import Environment
from aenv_ray.client.loop_thread import LoopThread, blocking
from aenv_ray.errors import ConfigError

T = TypeVar("T")


class SyncEnvironment:
    """`Environment` without ``await``: each method blocks, and may be called from any thread.

    Takes the same arguments and has the same methods. The calls run on an event loop in a
    background thread, which `close` ends.
    """

    def __init__(self, env_name: str, **options: Any) -> None:
        self._environment = Environment(env_name, **options)
        self._loop = LoopThread("aenv-sync")
        self.env_name = self._environment.env_name
        self.timeout = self._environment.timeout
        self.startup_timeout = self._environment.startup_timeout
        self.max_retries = self._environment.max_retries
        self.skip_for_healthy = self._environment.skip_for_healthy

    @classmethod
    def attach(cls, instance_id: str, **options: Any) -> SyncEnvironment:
        """Return an environment on a live instance; leaving it releases the instance."""
        self = cls(instance_id.rpartition("-")[0], **options)
        try:
            self._environment = self._loop.wait(Environment.attach(instance_id, **options))
        except BaseException:
            self._loop.close()
            raise
        return self

    initialize = blocking(Environment.initialize)
    wait_for_ready = blocking(Environment.wait_for_ready)
    renew = blocking(Environment.renew)
    get_env_info = blocking(Environment.get_env_info)
    list_tools = blocking(Environment.list_tools)
    list_resources = blocking(Environment.list_resources)
    list_resource_templates = blocking(Environment.list_resource_templates)
    read_resource = blocking(Environment.read_resource)
    list_prompts = blocking(Environment.list_prompts)
    get_prompt = blocking(Environment.get_prompt)
    call_tool = blocking(Environment.call_tool)
    call_tools = blocking(Environment.call_tools)
    list_functions = blocking(Environment.list_functions)
    call_function = blocking(Environment.call_function)
    call_reward = blocking(Environment.call_reward)
    reset = blocking(Environment.reset)
    list_tasks = blocking(Environment.list_tasks)
    check_health = blocking(Environment.check_health)
    exec = blocking(Environment.exec)
    read_file = blocking(Environment.read_file)
    write_file = blocking(Environment.write_file)
    list_files = blocking(Environment.list_files)
    list_openai_tools = blocking(Environment.list_openai_tools)
    call_openai_tool = blocking(Environment.call_openai_tool)

    @property
    def instance_id(self) -> str | None:
        """The instance's id; see `Environment.instance_id`."""
        return self._environment.instance_id

    def tool_of_openai_name(self, name: str) -> str:
        """Return the name of a tool; see `Environment.tool_of_openai_name`."""
        return self._environment.tool_of_openai_name(name)

    def submit(self, call: Callable[[Environment], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a call of the environment in the background, without waiting for it.

        Args:
            call: Gets the `Environment`, and returns the coroutine of one of its methods.

        Returns:
            Its result. Cancelling the future cancels the call.
        """
        self._check_open()
        return self._loop.submit(call(self._environment))

    def __enter__(self) -> SyncEnvironment:
        self.initialize()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """End the instance, any number of times."""
        if not self._loop.is_closed:
            self._loop.wait(self._environment.release())

    destroy = release

    def logs(self, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Yield the output of the instance; see `Environment.logs`."""
        self._check_open()
        pieces = self._environment.logs(follow=follow, tail=tail)
        try:
            while (piece := self._loop.wait(anext(pieces, None))) is not None:
                yield piece
        finally:
            self._loop.wait(pieces.aclose())

    def close(self) -> None:
        """End the instance and the background thread, any number of times."""
        if self._loop.is_closed:
            return
        try:
            self.release()
        finally:
            self._loop.close()

    def _check_open(self) -> None:
        if self._loop.is_closed:
            raise ConfigError(
                f"this SyncEnvironment of {self._environment.env_name} is closed",
                hint="create a new one; release() without close() allows further calls",
            )
