"""The sampler: runs episodes concurrently, each on a fresh instance, and streams their records."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from aenv_ray.actors.create_options import CreateOptions
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.errors import INFRASTRUCTURE, AenvError, ConfigError, ToolError
from aenv_ray.sampling.episode import (
    Episode,
    EpisodeStatus,
    Step,
    Task,
    load_tasks,
    reward_number,
)
from aenv_ray.sampling.episode_file import EpisodeFile, finished_episodes
from aenv_ray.sampling.policy import (
    CALL_TIMEOUT_S,
    TEXT_LIMIT,
    EpisodeEnv,
    Policy,
    act,
    check_policy,
)
from aenv_ray.sampling.summary import Summary, summarize

INFRA_RETRIES: Final = 2
"""How often an episode starts anew, on a new instance, after an infrastructure failure."""
RETRY_PAUSE_S: Final = 0.5
"""Before an episode starts anew; grows with the attempts."""


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
        kept: list[Episode],
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._tasks = tasks
        self._concurrency = concurrency
        self._infra_retries = infra_retries
        self._options = options
        self._out = out
        self.output_failure: ConfigError | None = None
        """Why the output file lacks episodes; raised once all have been given. None: it does not.
        """
        self._kept = kept
        self._episodes = list(kept)
        self._started = 0.0
        self._wall_s = 0.0

    @property
    def total(self) -> int:
        """How many episodes there will be."""
        return len(self._tasks)

    @property
    def kept(self) -> int:
        """How many of them an earlier run had finished; they are not given again."""
        return len(self._kept)

    @property
    def episodes(self) -> list[Episode]:
        """The episodes that finished so far, in the order in which they did, kept ones first."""
        return list(self._episodes)

    def summary(self) -> Summary:
        """Return the numbers of the episodes that finished so far."""
        return summarize(self._episodes, self._wall_s, kept=len(self._kept))

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
        """Run all episodes and return the summary.

        Raises:
            ConfigError: Not all were written to the output file; `episodes` and `summary` have all.
        """
        for _ in self:
            pass
        return self.summary()

    # --- running --------------------------------------------------------------------------------

    async def _run(self, finished: asyncio.Queue[Episode | None]) -> None:
        if self._started:
            raise ConfigError("a sampling runs once", hint="call sample() again")
        self._started = time.perf_counter()
        done = {episode.index for episode in self._kept}
        waiting = [one for one in enumerate(self._tasks) if one[0] not in done][::-1]
        output = EpisodeFile(self._out, self._kept) if self._out else None

        async def work() -> None:
            while waiting:
                index, task = waiting.pop()
                episode = await self._episode(index, task)
                if output is not None:
                    output.write(episode)
                self._episodes.append(episode)
                self._wall_s = time.perf_counter() - self._started
                finished.put_nowait(episode)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(waiting))):
                    group.create_task(work())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            if output is not None:
                output.close()
                self.output_failure = output.failure
        if self.output_failure is not None:
            raise self.output_failure

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
            output = await act(self._policy, env, task)
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
        return repr(output)[:TEXT_LIMIT]
    return output


def sample(
    environment: str | Path,
    policy: Policy,
    tasks: str | Path | Iterable[Task | Mapping[str, Any]],
    *,
    concurrency: int = 16,
    infra_retries: int = INFRA_RETRIES,
    out: str | Path | None = None,
    resume: bool = False,
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
        out: File that gets one JSON object a line for each finished episode. When it cannot be
            written any more the run goes on, and ends with ConfigError after its last episode.
        resume: Keep what an interrupted run of the same tasks wrote to `out`, and run the rest;
            what the infrastructure failed runs again. The summary is of all episodes, but for
            `wall_s` and `calls_per_s`, which are this run's.
        actor: Density of the instances; shared is a hundred times cheaper.
        options: Further options of `aenv_ray.create`.

    Returns:
        An iterator of `Episode`; nothing runs before it is iterated, or `Sampling.run` is called.

    Raises:
        ConfigError: A malformed task, file or option, or a policy that cannot be called or yields.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency {concurrency!r} is not at least 1")
    check_policy(policy)
    file, found = Path(out) if out is not None else None, load_tasks(tasks)
    if resume and file is None:
        raise ConfigError("there is nothing to resume without out", hint="name the run's file")
    return Sampling(
        str(environment),
        policy,
        found,
        concurrency=concurrency,
        infra_retries=infra_retries,
        options=CreateOptions(actor=actor, **options),
        out=file,
        kept=finished_episodes(file, found) if resume and file is not None else [],
    )
