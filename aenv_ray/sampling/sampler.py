"""The sampler: runs episodes concurrently, each on a fresh instance, and streams their records."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from aenv_ray.actors.create_options import CreateOptions
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    ConfigError,
    FunctionFailed,
    InstanceReleased,
    ToolError,
)
from aenv_ray.models import ExecResult, ToolResult
from aenv_ray.sampling.episode import Episode, EpisodeStatus, Step, Task, load_tasks
from aenv_ray.sampling.summary import Summary, summarize

T = TypeVar("T")
Policy = Callable[[Any, Task], Any]
"""``policy(env, task)``, sync or async. `env` is an `EpisodeEnv` or its sync facade; what it
returns is recorded as the episode's output."""

INFRA_RETRIES: Final = 2
"""How often an episode starts anew, on a new instance, after an infrastructure failure."""
RETRY_PAUSE_S: Final = 0.5
"""Before an episode starts anew; grows with the attempts."""
CALL_TIMEOUT_S: Final = 60.0
_TEXT_LIMIT: Final = 20_000
"""Characters of a step's text that a record keeps."""


class EpisodeEnv:
    """The environment of one episode, as an async policy sees it: tools, commands and files.

    Rewards, functions and release are the sampler's, not the policy's (invariant 8).
    """

    def __init__(self, instance: RayInstance, steps: list[Step]) -> None:
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
            result = await self._noting(self._instance.call_tool(name, arguments or {}, timeout_s))
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
        if len(text) > _TEXT_LIMIT:
            text = f"{text[:_TEXT_LIMIT]}\n[record cut: {len(text)} characters]"
        self._steps.append(
            Step(
                tool=name,
                arguments=dict(arguments or {}),
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


class Sampling:
    """Episodes as they finish: iterate with ``for`` or ``async for``; then `summary`.

    Leaving the loop early, an exception in it, or Ctrl-C cancels what runs and releases every
    instance. It can be iterated once.
    """

    def __init__(
        self,
        environment: str,
        policy: Policy,
        tasks: list[Task],
        *,
        concurrency: int,
        infra_retries: int,
        options: CreateOptions,
        out: Path | None,
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._tasks = tasks
        self._concurrency = concurrency
        self._infra_retries = infra_retries
        self._options = options
        self._out = out
        self._episodes: list[Episode] = []
        self._started = 0.0
        self._wall_s = 0.0

    @property
    def total(self) -> int:
        """How many episodes there will be."""
        return len(self._tasks)

    @property
    def episodes(self) -> list[Episode]:
        """The episodes that finished so far, in the order in which they did."""
        return list(self._episodes)

    def summary(self) -> Summary:
        """Return the numbers of the episodes that finished so far."""
        return summarize(self._episodes, self._wall_s)

    # --- iterating ------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Episode]:
        finished: asyncio.Queue[Episode | None] = asyncio.Queue()
        runner = asyncio.create_task(self._run(finished))
        runner.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (episode := await finished.get()) is not None:
                yield episode
            await runner
        finally:
            runner.cancel()
            await asyncio.wait([runner])

    def __iter__(self) -> Iterator[Episode]:
        results: SimpleQueue[Episode | BaseException | None] = SimpleQueue()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def pump() -> None:
            async def forward() -> None:
                async for episode in self:
                    results.put(episode)

            task = asyncio.create_task(forward())
            stopper = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait([task, stopper], return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    results.put(error)
            finally:
                stopper.cancel()
                results.put(None)

        thread = threading.Thread(target=loop.run_until_complete, args=(pump(),), daemon=True)
        thread.start()
        try:
            while (item := results.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def run(self) -> Summary:
        """Run all episodes and return the summary."""
        for _ in self:
            pass
        return self.summary()

    # --- running --------------------------------------------------------------------------------

    async def _run(self, finished: asyncio.Queue[Episode | None]) -> None:
        if self._started:
            raise ConfigError("a sampling runs once", hint="call sample() again")
        self._started = time.perf_counter()
        waiting = list(enumerate(self._tasks))[::-1]
        output = self._out.open("w", encoding="utf-8") if self._out else None

        async def work() -> None:
            while waiting:
                index, task = waiting.pop()
                episode = await self._episode(index, task)
                if output is not None:
                    output.write(episode.model_dump_json() + "\n")
                    output.flush()
                self._episodes.append(episode)
                self._wall_s = time.perf_counter() - self._started
                finished.put_nowait(episode)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(self._tasks))):
                    group.create_task(work())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            if output is not None:
                output.close()

    async def _episode(self, index: int, task: Task) -> Episode:
        """Run one episode, anew after an infrastructure failure as often as allowed."""
        attempt = 1
        while True:
            episode = await self._attempt(index, task, attempt)
            if episode.status is not EpisodeStatus.INFRA_FAILED or attempt > self._infra_retries:
                return episode
            await asyncio.sleep(RETRY_PAUSE_S * attempt)
            attempt += 1

    async def _attempt(self, index: int, task: Task, attempt: int) -> Episode:
        steps: list[Step] = []
        started = time.perf_counter()
        fields: dict[str, Any] = {"index": index, "task_id": task.id, "attempts": attempt}
        instance: RayInstance | None = None
        try:
            instance = await RayInstance.create(self._environment, self._options)
            fields["create_s"] = time.perf_counter() - started
            fields["instance_id"] = instance.handle.instance_id
            fields |= await self._roll_out(instance, task, steps)
        except INFRASTRUCTURE as exc:
            fields |= _failure(EpisodeStatus.INFRA_FAILED, exc)
        finally:
            if instance is not None:
                await _release(instance)
        duration_s = time.perf_counter() - started
        return Episode(steps=tuple(steps), duration_s=duration_s, **fields)

    async def _roll_out(
        self, instance: RayInstance, task: Task, steps: list[Step]
    ) -> dict[str, Any]:
        """Prepare, let the policy act, and judge; infrastructure failures pass."""
        try:
            if task.setup is not None:
                function = task.setup.function or ""
                await instance.call_function(function, task.setup.arguments, CALL_TIMEOUT_S)
        except ToolError as exc:
            return _failure(EpisodeStatus.REWARD_FAILED, exc)
        env = EpisodeEnv(instance, steps)
        try:
            output = await self._act(env, task)
        except INFRASTRUCTURE:
            raise
        except Exception as exc:  # whatever a policy raises is its failure
            if env.failure is not None:
                raise env.failure from exc
            return _failure(EpisodeStatus.POLICY_FAILED, exc)
        if env.failure is not None:
            raise env.failure  # swallowed by the policy; no reward may come of it (invariant 2)
        fields: dict[str, Any] = {"status": EpisodeStatus.COMPLETED, "reward": None}
        fields["output"] = _recordable(output)
        if task.reward is None:
            return fields
        try:
            detail = await instance.call_reward(
                task.reward.arguments, task.reward.name, CALL_TIMEOUT_S
            )
            return fields | {"reward": reward_number(detail), "reward_detail": detail}
        except ToolError as exc:
            return _failure(EpisodeStatus.REWARD_FAILED, exc)

    async def _act(self, env: EpisodeEnv, task: Task) -> Any:
        if inspect.iscoroutinefunction(self._policy):
            return await self._policy(env, task)
        loop = asyncio.get_running_loop()
        sync_env = SyncEpisodeEnv(env, loop)
        done: asyncio.Future[Any] = loop.create_future()
        # A daemon thread: a policy that does not return must not keep the process from ending.
        thread = threading.Thread(
            target=_run_policy, args=(self._policy, sync_env, task, done), daemon=True
        )
        thread.start()
        try:
            output = await done
        finally:
            sync_env.abandon()
        return await output if inspect.isawaitable(output) else output


def _run_policy(policy: Policy, env: SyncEpisodeEnv, task: Task, done: asyncio.Future[Any]) -> None:
    """Run a sync policy in its thread and hand its outcome to the loop."""

    def hand_over(output: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(output)

    output, error = None, None
    try:
        output = policy(env, task)
    except Exception as exc:  # noqa: BLE001  # it belongs to the episode, not to this thread
        error = exc
    except BaseException as exc:  # noqa: BLE001  # as a future cannot carry: SystemExit and such
        error = RuntimeError(f"the policy raised {type(exc).__name__}: {exc}")
    if isinstance(error, StopIteration):
        error = RuntimeError("the policy raised StopIteration")
    with contextlib.suppress(RuntimeError):  # the loop is closed: the sampling has ended
        done.get_loop().call_soon_threadsafe(hand_over, output, error)


def _failure(status: EpisodeStatus, exc: BaseException) -> dict[str, Any]:
    code = exc.code if isinstance(exc, AenvError) else type(exc).__name__
    message = exc.message if isinstance(exc, AenvError) else str(exc)
    return {"status": status, "reward": None, "error": f"{code}: {message}"}


async def _release(instance: RayInstance) -> None:
    """Release whatever happens: also when the episode was cancelled a moment ago."""
    task = asyncio.ensure_future(instance.release())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
    except AenvError:
        pass  # its node is gone; the launcher's deadline and the controller see to the rest


def _recordable(output: Any) -> Any:
    try:
        json.dumps(output)
    except (TypeError, ValueError):
        return repr(output)[:_TEXT_LIMIT]
    return output


def reward_number(detail: Any) -> float:
    """Return the number in what a reward function returned.

    It is a number itself, or under ``score``, ``reward`` or ``total_reward``.

    Raises:
        FunctionFailed: There is no finite number: better no reward than a made-up one.
    """
    value = detail
    if isinstance(detail, Mapping):
        value = next((detail[k] for k in ("score", "reward", "total_reward") if k in detail), None)
    with contextlib.suppress(OverflowError):  # an int that no float holds
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
    raise FunctionFailed(
        f"the reward returned {str(detail)[:200]!r}, in which there is no number",
        hint='return a number or {"score": number}',
    )


def sample(
    environment: str | Path,
    policy: Policy,
    tasks: str | Path | Iterable[Task | Mapping[str, Any]],
    *,
    concurrency: int = 16,
    infra_retries: int = INFRA_RETRIES,
    out: str | Path | None = None,
    actor: str = "shared",
    **options: Any,
) -> Sampling:
    """Run one episode for each task and stream their records as they finish.

    Args:
        environment: ``name@version``, ``name``, or a project's path.
        policy: ``policy(env, task)``, sync or async.
        tasks: Tasks, objects of their shape, or a JSON Lines file.
        concurrency: Episodes, and so instances, at a time; at least 1.
        infra_retries: New starts of an episode after an infrastructure failure.
        out: File that gets one JSON object a line for each finished episode.
        actor: Density of the instances; shared is a hundred times cheaper.
        options: Further options of `aenv_ray.create`.

    Returns:
        An iterator of `Episode`; nothing runs before it is iterated, or `Sampling.run` is called.

    Raises:
        ConfigError: A malformed task, file or option.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency {concurrency!r} is not at least 1")
    return Sampling(
        str(environment),
        policy,
        load_tasks(tasks),
        concurrency=concurrency,
        infra_retries=infra_retries,
        options=CreateOptions(actor=actor, **options),
        out=Path(out) if out is not None else None,
    )
