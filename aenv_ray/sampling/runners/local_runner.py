"""A runner in this process: its queue of tasks, the policy, and its instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from aenv_ray import logs
from aenv_ray.actors.calls.call_batching import BatchClients
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import Created
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.instance_batches import InstanceBatches
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.config import settings
from aenv_ray.project.project import Project
from aenv_ray.sampling.loop_watch import LoopWatch
from aenv_ray.sampling.policies.base import AgentPolicy, opened
from aenv_ray.sampling.runners.assignments import Assignment, Group, GroupRun
from aenv_ray.sampling.runners.instance_source import GroupStart, InstanceSource
from aenv_ray.sampling.runners.runner import EpisodeRules, Runner
from aenv_ray.sampling.runners.runner_pool import RunnerLink
from aenv_ray.sampling.runners.task_images import TaskImages
from aenv_ray.trajectories.schema import Episode

MOST_AT_ONCE: Final = 512
"""Maximum number of episodes in one report: more would block the driver for too long."""

PlaySample = Callable[[Assignment, GroupStart], Awaitable[Episode]]


class RunnerQueue:
    """Plays groups of tasks in order, as many at once as its limit allows. For one event loop.

    Args:
        play: Plays one task; it raises what ends the run.
    """

    def __init__(self, play: PlaySample) -> None:
        self._play = play
        self._groups: deque[Group] = deque()
        self._limit = 1
        self._playing: set[asyncio.Task[None]] = set()
        self._episodes: list[Episode] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._starved = asyncio.Event()
        """Set while `is_starved` or nothing is played: finished episodes are reported now."""
        self._has_more = True

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        """Add groups.

        Args:
            groups: A group begins once it can begin as a whole.
            limit: Maximum number of episodes at once; only a group that is larger exceeds it.
            has_more: Whether more tasks may follow.
        """
        self._groups += groups
        self._limit = limit
        self._has_more = has_more
        self._begin()
        self._note_hunger()

    async def take_back(self, most: int) -> list[int]:
        """Remove groups that have not begun, the last first; return the indices of their tasks.

        Args:
            most: Maximum number of episodes, with the extra samples.
        """
        taken: list[int] = []
        while self._groups and self._groups[-1].size <= most:
            group = self._groups.pop()
            most -= group.size
            taken += [one.index for one in group.members]
        self._note_hunger()
        return taken

    def left(self) -> int | None:
        """Return how many tasks have not begun; None if more may follow."""
        return None if self._has_more else sum(group.size for group in self._groups)

    @property
    def is_starved(self) -> bool:
        """Whether it could begin another episode immediately, if it were given one."""
        return self._has_more and not self._groups and len(self._playing) < self._limit

    def _note_hunger(self) -> None:
        if self.is_starved or not self._playing:
            self._starved.set()
        else:
            self._starved.clear()

    def _begin(self) -> None:
        while self._groups and self._failure is None:
            playing = len(self._playing)
            if playing and playing + self._groups[0].size > self._limit:
                return
            self._begin_group(self._groups.popleft())

    def _begin_group(self, group: Group) -> None:
        first = group.members[0]
        extras = [replace(first, index=-1 - n) for n in range(group.extra)]
        run, start = GroupRun(group), GroupStart(group.size)
        tasks: set[asyncio.Task[None]] = set()
        for one in (*group.members, *extras):
            task = asyncio.create_task(self._run(one, start, run, tasks))
            tasks.add(task)
            self._playing.add(task)
            task.add_done_callback(self._end)

    async def _run(
        self, one: Assignment, start: GroupStart, run: GroupRun, tasks: set[asyncio.Task[None]]
    ) -> None:
        """Play one sample of a group; the last one that is kept ends the others."""
        episode = await self._play(one, start)  # `self._episodes += …await…` would use an old list
        self._episodes += run.finish(episode)
        if run.is_complete:
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._playing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._news.set()
        self._begin()
        self._note_hunger()

    async def finished(
        self, *, linger_s: float = 0.0, wait_s: float | None = None
    ) -> list[Episode]:
        """Return finished episodes, each once; at most `MOST_AT_ONCE`.

        Args:
            linger_s: How long to wait for further episodes, unless the runner runs out of tasks.
            wait_s: How long to wait for the first; None: until there is one.

        Raises:
            BaseException: Raised by `play`; the run is over.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return []
        if linger_s and len(self._episodes) < MOST_AT_ONCE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._starved.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        episodes, self._episodes = self._episodes[:MOST_AT_ONCE], self._episodes[MOST_AT_ONCE:]
        if self._episodes:
            self._news.set()
        return episodes

    async def close(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        self._groups.clear()
        while self._playing:
            for task in self._playing:
                task.cancel()
            await asyncio.wait(self._playing)


class LocalRunner(RunnerQueue):
    """Plays tasks in this process. Use it on one event loop.

    Args:
        fabric: The connection.
        project: The project of the instances.
        options: The options of the instances.
        policy: As made for this runner; see `open`.
        rules: How episodes are played.
        labels: Added to those of the instances.
        resources: Closed with the runner.
        watch: Watches the loop, until the runner is closed.
    """

    name = "driver"
    is_remote = False

    def __init__(
        self,
        fabric: Fabric,
        project: Project,
        options: CreateOptions,
        policy: AgentPolicy,
        rules: EpisodeRules,
        labels: Mapping[str, str],
        resources: AsyncExitStack,
        watch: LoopWatch,
    ) -> None:
        self._resources = resources
        self._watch = watch
        self._images = TaskImages(settings())
        batches = InstanceBatches(fabric, project, options, labels)
        self._source = instance_source(batches, left=self.left)
        runner = Runner(
            policy, self._source, rules, self._images,
            is_connected=batches.is_connected, owner=options.owner, blocked_s=watch.blocked_s,
        )  # fmt: skip
        super().__init__(runner.play)

    @classmethod
    async def open(
        cls,
        fabric: Fabric,
        project: Project,
        options: CreateOptions,
        policy: AgentPolicy | type,
        rules: EpisodeRules,
        labels: Mapping[str, str] | None = None,
        watch: LoopWatch | None = None,
    ) -> LocalRunner:
        """Return a runner with a policy of its own, which watches the running loop.

        Raises:
            ConfigError: The policy is a class whose constructor raised.
        """
        resources = AsyncExitStack()
        made = await resources.enter_async_context(opened(policy))
        watch = watch or LoopWatch()
        runner = cls(fabric, project, options, made, rules, labels or {}, resources, watch)
        watch.start()
        return runner

    @property
    def queued(self) -> int:
        """See `RunnerLink.queued`."""
        return self._source.queued

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        """See `RunnerQueue.give`."""
        self._source.resize(limit)
        await super().give(groups, limit, has_more=has_more)

    async def close(self) -> None:
        """End all episodes, release their instances, and close the policy."""
        try:
            await super().close()
        finally:
            self._watch.stop()
            await self._source.close()
            await self._images.close()
            await self._resources.aclose()


def instance_source(
    batches: InstanceBatches, *, left: Callable[[], int | None], is_eager: bool = False
) -> InstanceSource:
    """Return a source of instances for this process, at first for one episode at once."""
    sender = BatchClients()

    def attach(created: Created) -> AsyncEnvHandle:
        handle = batches.handle(created)
        return AsyncEnvHandle(handle, sender.to(handle), created.introduction)

    return InstanceSource(batches, attach, concurrency=1, left=left, is_eager=is_eager)


class DriverRunners:
    """One runner, in the driver; see `Runners`.

    Args:
        open_runner: Returns it.
    """

    def __init__(self, open_runner: Callable[[], Awaitable[RunnerLink]]) -> None:
        self._open = open_runner
        self._is_open = False

    async def new(self, wait_s: float) -> list[RunnerLink]:
        """See `Runners.new`."""
        if self._is_open:
            await asyncio.sleep(wait_s)
            return []
        self._is_open = True
        logs.configure("runner")
        return [await self._open()]

    @property
    def expected(self) -> int:
        """See `Runners.expected`."""
        return 0

    def leaving(self) -> set[str]:
        """See `Runners.leaving`."""
        return set()

    async def lost(self, runner: RunnerLink) -> None:
        """See `Runners.lost`; it lives as long as the driver."""

    async def close(self) -> None:
        """See `Runners.close`."""
