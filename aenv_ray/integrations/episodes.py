"""Episodes whose policy is a trainer: it begins them, calls tools, and asks for their outcome.

    pool = EpisodePool("mini-terminal")
    episode = await pool.begin({"id": "count", "instruction": "…"})
    result = await episode.call_tool("execute_command", {"command": "ls"})
    outcome = await episode.finish()
    loss_mask = 0.0 if outcome.is_void else 1.0

The sampler's runner plays them, with a policy that waits for the trainer. So instances are reset
and reused, setups and rewards run, failures are attributed, and records are made as in `sample`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.driver_api import connector
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.instance_batches import InstanceBatches
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.client.loop_thread import LoopThread, blocking
from aenv_ray.config import settings
from aenv_ray.errors import ConfigError, InstanceReleased
from aenv_ray.models import ExecResult, ToolResult
from aenv_ray.project.project import Project
from aenv_ray.sampling.attribution import FailureRewards
from aenv_ray.sampling.episode_env import CALL_TIMEOUT_S, EpisodeEnv
from aenv_ray.sampling.runners.assignments import Assignment
from aenv_ray.sampling.runners.instance_source import GroupStart
from aenv_ray.sampling.runners.local_runner import instance_source
from aenv_ray.sampling.runners.runner import INFRA_RETRIES, EpisodeRules, Runner
from aenv_ray.sampling.runners.task_images import TaskImages
from aenv_ray.trajectories.schema import Episode, Generation, Task
from aenv_ray.trajectories.shards import EpisodeOutput, continue_output
from aenv_ray.trajectories.statistics import is_void
from aenv_ray.units import parse_duration_s
from aenv_ray.validation import problems_of

logger = logging.getLogger("aenv_ray")

T = TypeVar("T")

CLOSE_S: Final = 15.0
"""Longest wait for the releases of a pool; then deadlines and the end of the job end instances."""

_current: ContextVar[LiveEpisode] = ContextVar("aenv_live_episode")


@dataclass(frozen=True)
class EpisodeOutcome:
    """How an episode ended, for a trainer."""

    episode: Episode
    """The record."""

    @property
    def reward(self) -> float | None:
        """The reward; None if the episode is void, or its task has no reward."""
        return self.episode.reward

    @property
    def is_void(self) -> bool:
        """Whether nothing can be learned from it: leave it out of means and losses."""
        return is_void(self.episode)


class LiveEpisode:
    """An episode that a trainer plays; made by `EpisodePool.begin`.

    Its methods may be awaited on any event loop, and called concurrently. `SyncEpisode` has the
    same for code without an event loop. Both can be given to the adapters of agent frameworks
    instead of an `Environment`.

    An episode whose instance could not be started has ended already: calls raise, and `finish`
    returns its outcome, which is void.
    """

    def __init__(self, env_name: str, task: Task, loop: LoopThread, version: _Version) -> None:
        self.env_name = env_name
        self.task = task
        self._loop = loop
        self._version = version
        self._env: EpisodeEnv | None = None
        self._begun = asyncio.Event()
        self._finished = asyncio.Event()
        self._is_abandoned = False
        self._playing: asyncio.Task[Episode]

    # --- on the pool's loop ---------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the trainer could act."""
        return self._env is not None

    def play(self, playing: Coroutine[Any, Any, Episode]) -> None:
        """Start to play; the policy finds the episode in its context."""
        context = copy_context()
        context.run(_current.set, self)
        self._playing = asyncio.get_running_loop().create_task(playing, context=context)
        self._playing.add_done_callback(lambda _: self._begun.set())

    async def begun(self) -> None:
        """Wait until the trainer can act, or the episode has failed before.

        Raises:
            InstanceReleased: The episode was abandoned, as by the end of the pool.
            AenvError: The options or the task are wrong.
        """
        await self._begun.wait()
        self._check_not_abandoned()
        if self._playing.done():
            self._playing.result()

    async def hand_to_trainer(self, env: EpisodeEnv) -> None:
        """Wait until the trainer has acted: the policy of the episode."""
        self._env = env
        self._note_version()
        self._begun.set()
        await self._finished.wait()
        self._note_version()

    def _note_version(self) -> None:
        if self._env is not None and self._version.value is not None:
            self._env.record_policy_version(self._version.value)

    async def _acting(self, call: Callable[[EpisodeEnv], Coroutine[Any, Any, T]]) -> T:
        if self._env is None or self._playing.done() or self._finished.is_set():
            raise InstanceReleased(
                f"the episode of task {self.task.id!r} has ended{self._why()}",
                hint="finish() returns its outcome; begin() begins another",
            )
        self._note_version()
        return await call(self._env)

    def _why(self) -> str:
        is_known = self._playing.done() and not self._playing.cancelled()
        error = self._playing.result().error if is_known else None
        return f": {error}" if error else ""

    async def _finish(self, generation: Generation | None) -> EpisodeOutcome:
        self._check_not_abandoned()
        if generation is not None and self._env is not None:
            self._env.record_generation(generation)
        self._finished.set()
        await asyncio.wait([self._playing])  # which continues if this is cancelled
        self._check_not_abandoned()
        return EpisodeOutcome(self._playing.result())

    def _check_not_abandoned(self) -> None:
        if self._is_abandoned:
            raise InstanceReleased(
                f"the episode of task {self.task.id!r} was abandoned", hint="begin another episode"
            )

    async def stop(self) -> None:
        """See `abandon`."""
        if self._playing.done():
            return
        self._is_abandoned = True
        self._playing.cancel()
        await asyncio.wait([self._playing])

    # --- for the trainer ------------------------------------------------------------------------

    async def on_pool(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the pool's event loop; cancelling cancels it."""
        return await asyncio.wrap_future(_submitted(self._loop, call))

    @property
    def instance_id(self) -> str | None:
        """Id of its instance; None if none was started."""
        return None if self._env is None else self._env.instance_id

    @property
    def setup_result(self) -> Any:
        """What the task's setup returned; None without one."""
        return None if self._env is None else self._env.setup_result

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools: ``name, description, inputSchema``."""
        return await self.on_pool(self._acting(lambda env: env.list_tools()))

    async def call_tool(
        self,
        tool_name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> ToolResult:
        """Call a tool; the call is a step of the episode.

        Args:
            tool_name: Name of the tool.
            arguments: Arguments by name.
            timeout: Seconds. None: 60.

        Raises:
            ToolError: The call was refused or stopped; the episode can continue.
            AenvError: The episode is over: `finish` returns its outcome.
        """
        limit_s = CALL_TIMEOUT_S if timeout is None else timeout
        return await self.on_pool(
            self._acting(lambda env: env.call_tool(tool_name, arguments or {}, limit_s))
        )

    async def exec(self, command: str | list[str], timeout: float | None = None) -> ExecResult:
        """Run a command in the sandbox; this is not a step."""
        limit_s = CALL_TIMEOUT_S if timeout is None else timeout
        return await self.on_pool(self._acting(lambda env: env.exec(command, limit_s)))

    async def read_file(self, path: str) -> bytes:
        """Read a file of the sandbox."""
        return await self.on_pool(self._acting(lambda env: env.read_file(path)))

    async def write_file(self, path: str, data: bytes | str) -> int:
        """Write a file of the sandbox; returns its size."""
        return await self.on_pool(self._acting(lambda env: env.write_file(path, data)))

    async def record_message(self, message: Mapping[str, Any]) -> None:
        """Add a chat message, in OpenAI's format, to the record."""

        async def record(env: EpisodeEnv) -> None:
            env.record_message(message)

        await self.on_pool(self._acting(record))

    async def record_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Put the tools that the model has, in OpenAI's format, into the record."""

        async def record(env: EpisodeEnv) -> None:
            env.record_tools(tools)

        await self.on_pool(self._acting(record))

    async def record_policy_version(self, version: int) -> None:
        """Add the version of the weights that wrote the next tokens to the record.

        For trainers that know it for each episode; others set that of the pool.
        """

        async def record() -> None:
            if self._env is not None:
                self._env.record_policy_version(version)

        await self.on_pool(record())

    async def finish(self, generation: Generation | None = None) -> EpisodeOutcome:
        """Run the reward, give the instance back, and return the outcome.

        Repeated calls return the same outcome: the reward runs once.

        Args:
            generation: The tokens, for the record.

        Raises:
            InstanceReleased: The episode was abandoned.
        """
        return await self.on_pool(self._finish(generation))

    def finish_soon(self) -> None:
        """Do the same as `finish` in the background, from any thread; nobody gets the outcome."""
        if not self._loop.is_closed:
            _submitted(self._loop, self._finish(None))

    async def abandon(self) -> None:
        """End the episode without a reward or a record, and release its instance."""
        await self.on_pool(self.stop())


@dataclass
class _Version:
    """Version of the weights that act."""

    value: int | None = None


class SyncEpisode:
    """`LiveEpisode` without ``await``: each method blocks, and may be called from any thread."""

    list_tools = blocking(LiveEpisode.list_tools)
    call_tool = blocking(LiveEpisode.call_tool)
    exec = blocking(LiveEpisode.exec)
    read_file = blocking(LiveEpisode.read_file)
    write_file = blocking(LiveEpisode.write_file)
    record_message = blocking(LiveEpisode.record_message)
    record_tools = blocking(LiveEpisode.record_tools)
    finish = blocking(LiveEpisode.finish)
    abandon = blocking(LiveEpisode.abandon)

    def __init__(self, episode: LiveEpisode, loop: LoopThread) -> None:
        self._episode = episode
        self._loop = loop
        self.env_name = episode.env_name
        self.task = episode.task

    @property
    def instance_id(self) -> str | None:
        """Id of its instance; None if none was started."""
        return self._episode.instance_id

    @property
    def setup_result(self) -> Any:
        """What the task's setup returned; None without one."""
        return self._episode.setup_result

    def submit(self, call: Callable[[LiveEpisode], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a call of the episode in the background; cancelling the future cancels it."""
        return _submitted(self._loop, call(self._episode))


def _submitted(loop: LoopThread, call: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a call on the event loop of a pool.

    Raises:
        InstanceReleased: The pool is closed.
    """
    if loop.is_closed:
        call.close()
        raise InstanceReleased("the pool of the episode is closed", hint="make another EpisodePool")
    return loop.submit(call)


class EpisodePool:
    """The episodes of one trainer process on one environment.

    It connects to Ray, or starts one, when it is first used. It may be pickled: the copy is a pool
    of its own. `close` releases the instances; it also runs when the process exits. The instances
    of a process that is killed end with its Ray job.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        infra_retries: Restarts of an episode whose instance or setup fails for infrastructure
            before the trainer acts. Afterwards such an episode is void.
        episode_timeout: As in `aenv_ray.sample`, and likewise the next ones.
        reward_on_death: Reward of episodes whose sandbox was ended from inside.
        reward_on_timeout: Reward of episodes that ran out of time in calls. None: void.
        reward_on_failure: Reward of episodes whose reward raised. None: void.
        out: File or directory of the records. The episodes of earlier processes there are kept.
            Several processes at a time can write into a directory, one into a file. None: they are
            only in outcomes.
        actor: Density of the instances.
        options: Further options of `aenv_ray.create`.

    Raises:
        ConfigError: An option is wrong.
    """

    def __init__(
        self,
        environment: str | Path,
        *,
        infra_retries: int = INFRA_RETRIES,
        episode_timeout: str | float | None = None,
        reward_on_death: float = 0.0,
        reward_on_timeout: float | None = 0.0,
        reward_on_failure: float | None = 0.0,
        out: str | Path | None = None,
        actor: str = "shared",
        **options: Any,
    ) -> None:
        self._given = {
            "infra_retries": infra_retries, "episode_timeout": episode_timeout,
            "reward_on_death": reward_on_death, "reward_on_timeout": reward_on_timeout,
            "reward_on_failure": reward_on_failure, "out": out, "actor": actor, **options,
        }  # fmt: skip
        self.env_name = str(environment)
        rewards = FailureRewards(reward_on_death, reward_on_timeout, reward_on_failure)
        limit_s = None
        if episode_timeout is not None:
            limit_s = parse_duration_s(episode_timeout, what="episode_timeout")
        self._rules = EpisodeRules(infra_retries, rewards, limit_s)
        self._options = CreateOptions(actor=actor, **options)
        self._out = None if out is None else Path(out)
        self._version = _Version()
        self._lock = threading.Lock()
        self._core: _Core | None = None
        self._loop: LoopThread | None = None
        self._is_closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(EpisodePool, self.env_name, **self._given), ()

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that act from now on, as the trainer sets it.

        Running episodes note the change, so their records show which weights they were played with.
        """
        return self._version.value

    @policy_version.setter
    def policy_version(self, version: int | None) -> None:
        self._version.value = version

    # --- episodes -------------------------------------------------------------------------------

    async def begin(self, task: Task | Mapping[str, Any]) -> LiveEpisode:
        """Begin an episode: an instance is reset or started, and the task set up.

        Args:
            task: As in `aenv_ray.sample`; a mapping without an ``id`` gets one.

        Returns:
            The episode. One whose instance or setup failed has ended, see `LiveEpisode`.

        Raises:
            ConfigError: The task or an option is wrong, or the pool is closed.
            AenvError: The environment does not exist, or Ray cannot be reached.
        """
        return (await self.begin_group(task, 1))[0]

    async def begin_group(self, task: Task | Mapping[str, Any], count: int) -> list[LiveEpisode]:
        """Begin episodes of one task, whose instances start together or not at all.

        The arguments and errors are those of `begin`.
        """
        core, loop = await asyncio.to_thread(self._connected)
        return await loop.run(core.begin(_task(task), count), core.abandon)

    def begin_blocking(self, task: Task | Mapping[str, Any]) -> SyncEpisode:
        """Do the same as `begin`, without an event loop."""
        core, loop = self._connected()
        return SyncEpisode(loop.wait(core.begin(_task(task), 1), core.abandon)[0], loop)

    def reserve(self, count: int = 1) -> None:
        """Keep instances for further episodes that run at once, started ahead of `begin`.

        Between its episodes, an instance is kept for a quarter of its time to live; it is released
        earlier if a group of this pool waits long for room in the cluster.

        Args:
            count: Added to what was reserved; negative to reserve fewer.

        Raises:
            ConfigError: The pool is closed.
            AenvError: The environment does not exist, or Ray cannot be reached.
        """
        core, loop = self._connected()
        loop.wait(core.reserve(count))

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the environment: ``name, description, inputSchema``; blocks.

        Raises:
            AenvError: No instance can be started.
        """
        core, loop = self._connected()
        return loop.wait(core.list_tools())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, run on the event loop of the pool; blocks.

        Raises:
            ConfigError: The pool is closed.
            Exception: Raised by the coroutine.
        """
        try:
            loop = self._connected()[1]
        except BaseException:
            call.close()
            raise
        return loop.wait(call)

    # --- life -----------------------------------------------------------------------------------

    def _connected(self) -> tuple[_Core, LoopThread]:
        with self._lock:
            if self._is_closed:
                raise ConfigError(
                    f"the pool of {self.env_name} is closed", hint="make another EpisodePool"
                )
            if self._core is None or self._loop is None:
                fabric = connector()()
                project = resolve_environment(self.env_name, lambda: fabric)
                loop = LoopThread("aenv-episodes")
                try:
                    self._core = loop.wait(self._opened(fabric, project, loop))
                except BaseException:
                    loop.close()
                    raise
                self._loop = loop
                atexit.register(self.close)
            return self._core, self._loop

    async def _opened(self, fabric: Fabric, project: Project, loop: LoopThread) -> _Core:
        batches = InstanceBatches(fabric, project, self._options, {})
        owner = self._options.owner
        return _Core(self.env_name, batches, self._rules, self._out, self._version, loop, owner)

    def close(self) -> None:
        """Abandon running episodes and release all instances, any number of times.

        Raises:
            ConfigError: Records could not be written to `out`.
        """
        with self._lock:
            core, loop, self._is_closed = self._core, self._loop, True
            self._core = self._loop = None
        if core is None or loop is None:
            return
        atexit.unregister(self.close)
        try:
            loop.wait(core.close())
        finally:
            loop.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_shared: dict[str, EpisodePool] = {}
_sharing = threading.Lock()


def shared_pool(environment: str | Path, **options: Any) -> EpisodePool:
    """Return the pool of this process for an environment and options; the first call makes it.

    For trainers that make each environment from a name and arguments. It is closed when the process
    exits; after a `close`, the next call makes another.
    """
    key = json.dumps([str(environment), options], sort_keys=True, default=repr)
    with _sharing:
        found = _shared.get(key)
        if found is None or found.is_closed:
            found = _shared[key] = EpisodePool(environment, **options)
        return found


class _Core:
    """The part of a pool that lives on its event loop."""

    def __init__(
        self,
        env_name: str,
        batches: InstanceBatches,
        rules: EpisodeRules,
        out: Path | None,
        version: _Version,
        loop: LoopThread,
        owner: str | None,
    ) -> None:
        self._env_name = env_name
        self._loop = loop
        self._version = version
        self._source = instance_source(batches, left=self._idle, is_eager=True)
        self._images = TaskImages(settings())
        self._runner = Runner(
            _trainer, self._source, rules, self._images, _may_restart, batches.is_connected, owner
        )
        self._output: EpisodeOutput | None = None
        self._count = 0
        if out is not None:
            self._output, self._count = continue_output(out)
        self._lives: set[LiveEpisode] = set()
        self._reserved = 0

    def _idle(self) -> int:
        return max(0, self._reserved - len(self._lives))

    async def reserve(self, count: int) -> None:
        """See `EpisodePool.reserve`."""
        self._reserved = max(0, self._reserved + count)
        self._resize()

    def _resize(self) -> None:
        self._source.resize(max(1, self._reserved, len(self._lives)))
        self._source.start_ahead()

    async def list_tools(self) -> list[dict[str, Any]]:
        """See `EpisodePool.list_tools`."""
        instance = await self._source.acquire()
        try:
            tools = await instance.env.list_tools()
        except BaseException:  # it may be lost, or the pool is closing
            self._source.release(instance)
            raise
        self._source.give_back(instance)
        return tools

    async def begin(self, task: Task, count: int) -> list[LiveEpisode]:
        """See `EpisodePool.begin_group`."""
        if count < 1:
            raise ConfigError(
                f"a group has at least 1 episode, not {count!r}",
                hint="pass the number of samples of the task",
            )
        start, group = GroupStart(count), uuid4().hex if count > 1 else None
        lives = [LiveEpisode(self._env_name, task, self._loop, self._version) for _ in range(count)]
        self._lives.update(lives)
        self._resize()
        for sample, live in enumerate(lives):
            index = sample if group is not None else None
            assignment = Assignment(self._count, task, group=group, sample=index)
            self._count += 1
            live.play(self._play(live, assignment, start))
        try:
            for live in lives:
                await live.begun()
        except BaseException:
            await self.abandon(lives)
            raise
        return lives

    async def _play(self, live: LiveEpisode, assignment: Assignment, start: GroupStart) -> Episode:
        try:
            episode = await self._runner.play(assignment, start)
        finally:
            self._lives.discard(live)
            self._resize()
        if self._output is not None:
            self._output.write(episode)
        return episode

    async def abandon(self, lives: list[LiveEpisode]) -> None:
        """End episodes that nobody plays."""
        async with asyncio.TaskGroup() as tasks:
            for live in lives:
                tasks.create_task(live.stop())

    async def close(self) -> None:
        """See `EpisodePool.close`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.abandon(list(self._lives))
                await self._source.close()
                await self._images.close()
        except TimeoutError:
            logger.warning(
                "instances of %s were not released within %g s; they end with this Ray job",
                self._env_name, CLOSE_S,
            )  # fmt: skip
        if self._output is not None:
            self._output.close()
            if self._output.failure is not None:
                raise self._output.failure


async def _trainer(env: EpisodeEnv, _: Task) -> None:
    """Let the trainer act in the episode of this context."""
    await _current.get().hand_to_trainer(env)


def _may_restart() -> bool:
    return not _current.get().has_begun


def _task(given: Task | Mapping[str, Any]) -> Task:
    if isinstance(given, Task):
        return given
    try:
        return Task.model_validate({"id": uuid4().hex[:8], **given})
    except ValidationError as exc:
        raise ConfigError(
            f"invalid task: {problems_of(exc)}", hint="pass a Task, or a mapping with its fields"
        ) from exc
