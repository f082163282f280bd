"""The sampler: runs episodes concurrently, each on a new instance, and streams their records."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import (
    INFRASTRUCTURE,
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    DeadlineExceeded,
    InstanceExpired,
    SandboxDiedInside,
    SandboxExhausted,
    ToolError,
)
from aenv_ray.models import InstanceStatus
from aenv_ray.sampling.episode import Episode, EpisodeStatus, Step, Task, reward_number
from aenv_ray.sampling.episode_file import EpisodeFile, finished_episodes
from aenv_ray.sampling.policies.base import Policy, make
from aenv_ray.sampling.policies.named import named_policy
from aenv_ray.sampling.policy import (
    CALL_TIMEOUT_S,
    TEXT_LIMIT,
    EpisodeEnv,
    act,
)
from aenv_ray.sampling.summary import Summary, summarize
from aenv_ray.sampling.tasks import TaskFeed, TaskSource
from aenv_ray.sampling.user_code import PolicyTimedOut, within
from aenv_ray.units import parse_duration_s

logger = logging.getLogger("aenv_ray")

INFRA_RETRIES: Final = 2
"""Restarts of an episode, on a new instance, after infrastructure failures."""
RETRY_PAUSE_S: Final = 0.5
"""Pause before a restart, multiplied by the number of attempts."""
_BLOCKED_S: Final = 10.0
"""An event loop that does not react for this long is blocked by an async policy."""


class Sampling:
    """Yields episodes as they finish: iterate with ``for`` or ``async for``, then call `summary`.

    Leaving the loop early, an exception in it, or Ctrl-C cancels all episodes and releases their
    instances. It can be iterated once.
    """

    def __init__(
        self,
        environment: str,
        policy: Policy,
        tasks: TaskFeed,
        *,
        concurrency: int,
        infra_retries: int,
        episode_timeout_s: float | None,
        reward_on_death: float,
        options: CreateOptions,
        out: Path | None,
        kept: list[Episode],
    ) -> None:
        self._environment = environment
        self._policy = policy
        self._tasks = tasks
        self._concurrency = concurrency
        self._infra_retries = infra_retries
        self._episode_timeout_s = episode_timeout_s
        self._reward_on_death = reward_on_death
        self._options = options
        self._out = out
        self.output_failure: ConfigError | None = None
        """Why episodes are missing in the output file; raised at the end. None if none are."""
        self._kept = kept
        self._episodes = list(kept)
        self._started = 0.0
        self._wall_s = 0.0

    @property
    def total(self) -> int | None:
        """The number of episodes; None if the tasks have no length."""
        return self._tasks.total

    @property
    def kept(self) -> int:
        """The number of episodes that an earlier run finished; they are not yielded."""
        return len(self._kept)

    @property
    def episodes(self) -> list[Episode]:
        """The episodes finished so far, in that order, after those of an earlier run."""
        return list(self._episodes)

    def summary(self) -> Summary:
        """Return the summary of the episodes finished so far."""
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
            if _has_ended(thread, loop):
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

    def run(self) -> Summary:
        """Run all episodes and return the summary.

        Raises:
            ConfigError: The output file could not be written; `episodes` and `summary` have all
                episodes. Or a task of an iterator is invalid, or belongs to another run.
            Exception: Raised by the iterator of tasks, after the running episodes have ended.
        """
        for _ in self:
            pass
        return self.summary()

    # --- running --------------------------------------------------------------------------------

    async def _run(self, finished: asyncio.Queue[Episode | None]) -> None:
        if self._started:
            raise ConfigError("a sampling can be iterated once", hint="call sample() again")
        self._started = time.perf_counter()
        tasks = self._tasks
        try:
            await tasks.skip({one.index: one.task_id for one in self._kept}, str(self._out))
            await self._run_all(tasks, finished)
        finally:
            tasks.close()
        for failure in (tasks.failure, self.output_failure):
            if failure is not None:
                raise failure

    async def _run_all(self, tasks: TaskFeed, finished: asyncio.Queue[Episode | None]) -> None:
        output = EpisodeFile(self._out, self._kept) if self._out else None

        async def work() -> None:
            while (taken := await tasks.take()) is not None:
                episode = await self._episode(*taken)
                if output is not None:
                    output.write(episode)
                self._episodes.append(episode)
                self._wall_s = time.perf_counter() - self._started
                finished.put_nowait(episode)

        workers = self._concurrency
        if tasks.known is not None:
            workers = min(workers, len(tasks.known) - len(self._kept))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            if output is not None:
                output.close()
                self.output_failure = output.failure

    async def _episode(self, index: int, task: Task) -> Episode:
        """Run one episode, and restart it after infrastructure failures."""
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
        instance: AsyncEnvHandle | None = None
        try:
            instance = await AsyncEnvHandle.create(self._environment, self._options)
            fields["create_s"] = time.perf_counter() - started
            fields["instance_id"] = instance.handle.instance_id
            fields["environment"] = instance.handle.reference
            fields["environment_digest"] = instance.digest
            fields |= await self._roll_out(instance, task, steps)
        except INFRASTRUCTURE as exc:
            fields |= _failure(EpisodeStatus.INFRA_FAILED, exc)
        finally:
            if instance is not None:
                await _release(instance)
        duration_s = time.perf_counter() - started
        return Episode(steps=tuple(steps), duration_s=duration_s, **fields)

    async def _roll_out(
        self, instance: AsyncEnvHandle, task: Task, steps: list[Step]
    ) -> dict[str, Any]:
        """Run setup, policy and reward; infrastructure failures are raised."""
        try:
            if task.setup is not None:
                function = task.setup.function or ""
                await instance.call_function(function, task.setup.arguments, CALL_TIMEOUT_S)
        except ToolError as exc:
            return _failure(EpisodeStatus.REWARD_FAILED, exc)
        try:
            return await self._act_and_score(instance, task, steps)
        except (SandboxDiedInside, SandboxExhausted) as exc:
            return self._death(task, exc)
        except CallOutcomeUnknown:
            # The call may have been lost with a server in the sandbox that an agent has ended.
            try:
                await instance.list_tools()
            except SandboxDiedInside as exc:
                return self._death(task, exc)
            raise
        except InstanceExpired as exc:
            return _failure(EpisodeStatus.TIMED_OUT, exc)  # an agent can wait for its TTL

    def _death(self, task: Task, exc: AenvError) -> dict[str, Any]:
        reward = None if task.reward is None else self._reward_on_death
        return _failure(EpisodeStatus.DIED_INSIDE, exc) | {"reward": reward}

    async def _act_and_score(
        self, instance: AsyncEnvHandle, task: Task, steps: list[Step]
    ) -> dict[str, Any]:
        """Run policy and reward; infrastructure failures and deaths from inside are raised."""
        env = EpisodeEnv(instance, steps)
        try:
            acting = act(self._policy, env, task)
            output = await within(acting, self._episode_timeout_s, lambda: _expect(instance))
        except INFRASTRUCTURE:
            raise
        except PolicyTimedOut as exc:
            if env.failure is not None:
                raise env.failure from exc
            return _failure(EpisodeStatus.TIMED_OUT, DeadlineExceeded(str(exc)))
        except Exception as exc:  # every exception of a policy is its failure
            if env.failure is not None:
                raise env.failure from exc
            return _failure(EpisodeStatus.POLICY_FAILED, exc)
        if env.failure is not None:
            raise env.failure  # suppressed by the policy; it must not become a reward (invariant 2)
        fields: dict[str, Any] = {"status": EpisodeStatus.COMPLETED, "reward": None}
        fields["output"] = _recordable(output)
        if task.reward is None:
            return fields
        try:
            detail = await instance.call_reward(
                task.reward.arguments, task.reward.name, CALL_TIMEOUT_S
            )
            return fields | {"reward": reward_number(detail), "reward_detail": detail}
        except SandboxExhausted:
            raise
        except ToolError as exc:
            return _failure(EpisodeStatus.REWARD_FAILED, exc)


def _failure(status: EpisodeStatus, exc: BaseException) -> dict[str, Any]:
    code = exc.code if isinstance(exc, AenvError) else type(exc).__name__
    message = exc.message if isinstance(exc, AenvError) else str(exc)
    return {"status": status, "reward": None, "error": f"{code}: {message}"}


async def _expect(instance: AsyncEnvHandle) -> None:
    """Raise the error of a call if the instance has ended; otherwise make no call."""
    if (await instance.info()).status is not InstanceStatus.RUNNING:
        await instance.list_tools()


async def _release(instance: AsyncEnvHandle) -> None:
    """Release an instance, even if the episode is cancelled meanwhile."""
    task = asyncio.ensure_future(instance.release())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
    except AenvError:
        pass  # its node is lost; the launcher's deadline and the controller clean up


def _has_ended(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> bool:
    """Wait for a loop's thread to end; return False for a blocked one, which is abandoned."""
    while thread.is_alive():
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        thread.join(_BLOCKED_S)
        if thread.is_alive() and not turned.is_set():
            logger.warning(
                "an async policy blocks the event loop of all episodes and is abandoned; its "
                "instances end with this Ray job; use await in it, or make it a sync function"
            )
            return False
    return True


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _recordable(output: Any) -> Any:
    try:
        json.dumps(output)
    except (TypeError, ValueError):
        return repr(output)[:TEXT_LIMIT]
    return output


def sample(
    environment: str | Path,
    policy: Policy | type | str,
    tasks: TaskSource,
    *,
    concurrency: int = 16,
    infra_retries: int = INFRA_RETRIES,
    episode_timeout: str | float | None = None,
    reward_on_death: float = 0.0,
    out: str | Path | None = None,
    resume: bool = False,
    actor: str = "shared",
    **options: Any,
) -> Sampling:
    """Run one episode per task and stream the records as episodes finish.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        policy: ``policy(env, task)``, sync or async; a class that is made without arguments and
            whose instances are called so; or a name such as ``reference`` or ``module:function``.
        tasks: Tasks, mappings with their fields, or a JSON Lines file. A file or list is checked
            here. An iterator, async or not, may be slow or endless: a task is taken when an episode
            can start. If it raises, the running episodes are finished first.
        concurrency: Concurrent episodes, each with an instance; at least 1.
        infra_retries: Restarts of an episode after infrastructure failures.
        episode_timeout: Limit for the policy in an episode: 90, "90s", "30m". Then the policy is
            cancelled, and the episode is ``timed_out``. None: the life of the instance.
        reward_on_death: Reward of episodes whose sandbox the agent ended or exhausted, on purpose
            or not; they are ``died_inside``, counted in means, and not restarted. A finite number.
        out: File for one JSON object per line and finished episode. If it cannot be written, the
            run continues, and raises ConfigError after its last episode.
        resume: Keep the episodes in `out` of an interrupted run of the same tasks, and run the
            rest; episodes with infrastructure failures run again. The summary covers all episodes,
            except that `wall_s` and `calls_per_s` cover only this run.
        actor: Density of the instances; shared is a hundred times cheaper.
        options: Further options of `aenv_ray.create`.

    Returns:
        An iterator of `Episode`; nothing runs before it is iterated, or `Sampling.run` is called.

    Raises:
        ConfigError: An invalid file, option or task, or a policy that does not exist, is not
            callable or is a generator.
    """
    if not _is_finite(reward_on_death):
        raise ConfigError(f"reward_on_death must be a finite number, not {reward_on_death!r}")
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency!r}")
    made = make(named_policy(policy) if isinstance(policy, str) else policy)
    limit_s = None
    if episode_timeout is not None:
        limit_s = parse_duration_s(episode_timeout, what="episode_timeout")
    file, feed = Path(out) if out is not None else None, TaskFeed(tasks)
    if resume and file is None:
        raise ConfigError("resume requires out", hint="give the output file of the run to resume")
    return Sampling(
        str(environment),
        made,
        feed,
        concurrency=concurrency,
        infra_retries=infra_retries,
        reward_on_death=float(reward_on_death),
        episode_timeout_s=limit_s,
        options=CreateOptions(actor=actor, **options),
        out=file,
        kept=finished_episodes(file, feed.known) if resume and file is not None else [],
    )
