"""What a policy acts on, and how it is run: async on the loop, sync in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import INFRASTRUCTURE, AenvError, ConfigError, InstanceReleased, ToolError
from aenv_ray.models import ExecResult, ToolResult
from aenv_ray.sampling.episode import Step, Task
from aenv_ray.sampling.foreign_code import call, hand_over, outcome

T = TypeVar("T")
Policy = Callable[[Any, Task], Any]
"""``policy(env, task)``, sync or async. `env` is an `EpisodeEnv` or its sync facade; what it
returns is recorded as the episode's output."""

CALL_TIMEOUT_S: Final = 60.0
TEXT_LIMIT: Final = 20_000
"""Characters of a step's text that a record keeps."""


class EpisodeEnv:
    """The environment of one episode, as an async policy sees it: tools, commands and files.

    Rewards, functions and release are the sampler's, not the policy's (invariant 8).
    """

    def __init__(self, instance: AsyncEnvHandle, steps: list[Step]) -> None:
        self._instance = instance
        self._steps = steps
        self.failure: AenvError | None = None
        """The first infrastructure failure: it voids the episode, whatever the policy does."""
        self.instance_id = str(instance.handle.instance_id)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools: ``name, description, inputSchema``."""
        return await self._noting(self._instance.list_tools())

    async def _noting(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call and remember an infrastructure failure: a policy may swallow it."""
        try:
            return await call
        except INFRASTRUCTURE as exc:
            self.failure = self.failure or exc
            raise

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ToolResult:
        """Call a tool; the call becomes a step of the trajectory.

        Raises:
            ToolError: It was refused or stopped; the episode can go on.
            AenvError: The infrastructure failed; let it pass, the sampler starts the episode anew.
        """
        started = time.perf_counter()
        try:
            result = await self._noting(self._instance.call_tool(name, arguments, timeout_s))
        except ToolError as exc:
            self._note(name, arguments, exc.message, True, exc.code, started)
            raise
        self._note(name, arguments, result.text(), result.is_error, None, started)
        return result

    def _note(
        self,
        name: str,
        arguments: Mapping[str, Any] | None,
        text: str,
        is_error: bool,
        error: str | None,
        started: float,
    ) -> None:
        if len(text) > TEXT_LIMIT:
            text = f"{text[:TEXT_LIMIT]}\n[record cut: {len(text)} characters]"
        self._steps.append(
            Step(
                tool=name,
                # What is no object was refused; the text says so.
                arguments=dict(arguments) if isinstance(arguments, Mapping) else {},
                text=text,
                is_error=is_error,
                error=error,
                duration_s=time.perf_counter() - started,
            )
        )

    async def exec(self, command: str | list[str], timeout_s: float = CALL_TIMEOUT_S) -> ExecResult:
        """Run a command beside the tools; not a step."""
        return await self._noting(self._instance.exec(command, timeout_s))

    async def read_file(self, path: str) -> bytes:
        """Read a file of the sandbox."""
        return await self._noting(self._instance.read_file(path))

    async def write_file(self, path: str, data: bytes | str) -> int:
        """Write a file of the sandbox; returns its size."""
        return await self._noting(self._instance.write_file(path, data))


class SyncEpisodeEnv:
    """`EpisodeEnv` for a sync policy: the same methods, blocking."""

    def __init__(self, env: EpisodeEnv, loop: asyncio.AbstractEventLoop) -> None:
        self._env = env
        self._loop = loop
        self._abandoned = False
        self._calls: set[Future[Any]] = set()
        self.instance_id = env.instance_id

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._env, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._abandoned:
                raise InstanceReleased("the episode has ended", instance_id=self.instance_id)
            future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
            self._calls.add(future)
            try:
                return future.result()
            finally:
                self._calls.discard(future)

        return call

    def abandon(self) -> None:
        """Cancel what the policy still waits for, and refuse what it asks later."""
        self._abandoned = True
        for future in list(self._calls):
            future.cancel()


def check_policy(policy: Any) -> None:
    """Refuse what cannot act: a generator does nothing when it is called, and got a reward.

    Raises:
        ConfigError: It cannot be called, or yields.
    """
    yields = inspect.isgeneratorfunction(policy) or inspect.isasyncgenfunction(policy)
    if yields or not callable(policy):
        what = "yields" if yields else "cannot be called"
        raise ConfigError(
            f"the policy {policy!r} {what}",
            hint="write it as policy(env, task), sync or async, that returns when it has acted",
        )


async def act(policy: Policy, env: EpisodeEnv, task: Task) -> Any:
    """Run a policy and return what it returned; what it raised, it raises.

    What is no `Exception` arrives as a RuntimeError: it would end the loop of all episodes.
    """
    if inspect.iscoroutinefunction(policy):
        return await outcome(policy(env, task), "the policy")
    loop = asyncio.get_running_loop()
    sync_env = SyncEpisodeEnv(env, loop)
    done: asyncio.Future[Any] = loop.create_future()
    # A daemon thread: a policy that does not return must not keep the process from ending.
    thread = threading.Thread(target=_run_policy, args=(policy, sync_env, task, done), daemon=True)
    thread.start()
    try:
        output = await done
    finally:
        sync_env.abandon()
    return await outcome(output, "the policy") if inspect.isawaitable(output) else output


def _run_policy(policy: Policy, env: SyncEpisodeEnv, task: Task, done: asyncio.Future[Any]) -> None:
    """Run a sync policy in its thread and hand its outcome to the loop."""
    hand_over(done, *call(lambda: policy(env, task), "the policy"))
