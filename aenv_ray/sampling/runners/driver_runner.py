"""A runner in this process: the policy, its queue, and its instances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from aenv_ray import logs
from aenv_ray.actors.calls.call_batching import BatchClients
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import Created
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.instance_batches import InstanceBatches
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.config import settings
from aenv_ray.project.project import Project
from aenv_ray.sampling.policies.base import Policy, opened
from aenv_ray.sampling.runners.assignments import Group
from aenv_ray.sampling.runners.instance_source import InstanceSource
from aenv_ray.sampling.runners.runner import EpisodeRules, Runner
from aenv_ray.sampling.runners.runner_pool import RunnerLink
from aenv_ray.sampling.runners.runner_queue import RunnerQueue
from aenv_ray.sampling.runners.task_images import TaskImages
from aenv_ray.trajectories.schema import Episode


class LocalRunner:
    """Plays tasks in this process. Use it on one event loop.

    Args:
        fabric: The connection.
        project: The project of the instances.
        options: The options of the instances.
        policy: As made for this runner; see `open`.
        rules: How episodes are played.
        labels: Added to those of the instances.
        resources: Closed with the runner.
    """

    name = "driver"
    is_remote = False

    def __init__(
        self,
        fabric: Fabric,
        project: Project,
        options: CreateOptions,
        policy: Policy,
        rules: EpisodeRules,
        labels: Mapping[str, str],
        resources: AsyncExitStack,
    ) -> None:
        self._resources = resources
        self._images = TaskImages(settings())
        batches = InstanceBatches(fabric, project, options, labels)
        self._source = instance_source(batches, left=self._left)
        runner = Runner(
            policy, self._source, rules, self._images,
            is_connected=batches.is_connected, owner=options.owner,
        )  # fmt: skip
        self._queue = RunnerQueue(runner.play)

    @classmethod
    async def open(
        cls,
        fabric: Fabric,
        project: Project,
        options: CreateOptions,
        policy: Policy | type,
        rules: EpisodeRules,
        labels: Mapping[str, str] | None = None,
    ) -> LocalRunner:
        """Return a runner with a policy of its own.

        Raises:
            ConfigError: The policy is a class whose constructor raised.
        """
        resources = AsyncExitStack()
        made = await resources.enter_async_context(opened(policy))
        return cls(fabric, project, options, made, rules, labels or {}, resources)

    def _left(self) -> int | None:
        return self._queue.left()

    @property
    def queued(self) -> int:
        """See `RunnerLink.queued`."""
        return self._source.queued

    async def give(self, groups: Sequence[Group], limit: int, *, has_more: bool) -> None:
        """See `RunnerQueue.give`."""
        self._source.resize(limit)
        self._queue.give(groups, limit, has_more=has_more)

    async def take_back(self, most: int) -> list[int]:
        """See `RunnerQueue.take_back`."""
        return self._queue.take_back(most)

    async def finished(
        self, *, linger_s: float = 0.0, wait_s: float | None = None
    ) -> list[Episode]:
        """See `RunnerQueue.finished`."""
        return await self._queue.finished(linger_s=linger_s, wait_s=wait_s)

    async def close(self) -> None:
        """End all episodes, release their instances, and close the policy."""
        try:
            await self._queue.close()
        finally:
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
