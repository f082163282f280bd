"""The hub as one detached actor of the cluster, and how everybody else speaks with it.

The actor holds the connection to Redis and nothing else: it may die at any time, Ray restarts it,
and it finds in Redis all that it acknowledged. Where ``AENV_REDIS_URL`` names no Redis, it runs the
bundled one and therefore stays on its node, where the data is.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.hub.client import RemoteHub
from aenv_ray.hub.connection import connect, redacted
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.keys import DEFAULT_PREFIX
from aenv_ray.hub.leases import SWEEP_AT_ONCE
from aenv_ray.hub.ray_leases import MADE_BY_RAY, changes
from aenv_ray.hub.records import Lease, LeaseQuery
from aenv_ray.hub.redis_server import RedisServer
from aenv_ray.models import InstanceStatus

logger = logging.getLogger(__name__)

SWEEP_S: Final = 5.0
"""What is overdue is seen within this; so is a bundled Redis that died while nobody asked."""
COMPARE_TURNS: Final = 6
"""Of so many sweeps one compares leases with what runs."""
COMPARE_S: Final = 40.0
"""Deadline of the controller's answer; it waits up to 30 s for hosts that do not answer."""
END_S: Final = 20.0
"""Redis writes what it has first."""
START_S: Final = 120.0
"""A worker may have to start, and a large Redis to be read."""


class HubSettings(BaseModel):
    """What the hub is told when it is made; it keeps it over restarts."""

    model_config = ConfigDict(frozen=True)

    redis_url: str | None = Field(default=None, repr=False)
    """None: the bundled Redis."""
    prefix: str = DEFAULT_PREFIX
    data_dir: Path
    runtime_dir: Path


class HubHost:
    """The actor: one connection to Redis, and what keeps it and the leases in order."""

    def __init__(self, options: HubSettings, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock
        self._server = (
            RedisServer(options.data_dir, options.runtime_dir)
            if options.redis_url is None
            else None
        )
        self._core: HubCore | None = None
        self._is_doubtful = True
        # Ray runs this on the actor's loop, after a restart too, though nobody may call then.
        self._keeper = asyncio.get_running_loop().create_task(self._keep_order())

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Run a method of `HubCore`.

        Raises:
            FabricUnavailable: Redis does not answer.
            AenvError: What the method raises.
        """
        core = await self._ready()
        try:
            return await getattr(core, method)(*arguments, **options)
        except FabricUnavailable:
            self._is_doubtful = True
            raise

    async def compare(self) -> None:
        """Compare the leases of Ray code with what runs, and mend what differs.

        Raises:
            FabricUnavailable: Redis or the controller does not answer; nothing was ended for that.
        """
        leases: list[Lease] = []
        cursor: str | None = None
        while True:
            query = LeaseQuery(label=MADE_BY_RAY, limit=1000, cursor=cursor)
            page = await self.call("leases", query)
            leases += page.items
            cursor = page.cursor
            if cursor is None:
                break
        if not any(lease.status is InstanceStatus.RUNNING for lease in leases):
            return
        controller = await asyncio.to_thread(ray_api.find_actor, ray_api.CONTROLLER_NAME)
        if controller is None:
            return  # nothing tells which instances run
        with ray_api.translated("listing instances"):
            async with asyncio.timeout(COMPARE_S):
                ids = [lease.id for lease in leases]
                running, doubtful = await controller.account_for.remote(ids)
        gone, moved = changes(leases, running, doubtful)
        if gone:
            await self.call("end_leases", gone)
        for instance_id, deadline in moved.items():
            await self.call("update_lease", instance_id, deadline=deadline)

    async def end(self) -> None:
        """Leave Redis; a bundled one that nobody else uses ends. The actor is to be killed next."""
        await end_task(self._keeper)  # it may hold a connection
        if self._core is not None:
            await self._core.close()
        if self._server is not None:
            await self._server.end()

    async def _ready(self) -> HubCore:
        """Return the core once Redis runs, as far as one can know."""
        if self._server is not None and self._is_doubtful:
            await self._server.ensure()
        if self._core is None:
            url = self._options.redis_url
            client = connect(url) if url is not None else self._connect_bundled()
            where = redacted(url) if url is not None else "the hub's own"
            self._core = HubCore(client, self._clock, prefix=self._options.prefix, where=where)
        self._is_doubtful = False
        return self._core

    def _connect_bundled(self) -> Any:
        assert self._server is not None
        return self._server.connect()

    async def _keep_order(self) -> None:
        """Sweep and compare for ever."""
        for turn in itertools.count():
            try:
                while await self.call("sweep") >= SWEEP_AT_ONCE:
                    pass
                if turn % COMPARE_TURNS == 0:
                    await self.compare()
            except (AenvError, TimeoutError) as exc:
                # Who asks is told in full; this only keeps the log aware.
                logger.warning("the hub cannot put its leases in order: %r", exc)
            await asyncio.sleep(SWEEP_S)


@functools.cache
def _hub_class() -> Any:
    return ray_api.restartable_actor(HubHost, max_concurrency=1000)


def ensure_hub() -> RemoteHub:
    """Return the cluster's hub, making it when there is none; this process has joined Ray.

    Raises:
        ConfigError: Redis refuses us, its URL is malformed, or there is none to run.
        FabricUnavailable: It does not come up.
    """
    found = find_hub()
    if found is None:
        given = settings()
        options = HubSettings(
            redis_url=given.redis_url,
            prefix=given.redis_prefix,
            data_dir=given.data_dir.resolve(),
            runtime_dir=given.runtime_dir,
        )
        where: dict[str, Any] = ray_api.on_head()
        if options.redis_url is None:
            where = {"scheduling_strategy": ray_api.pinned(_home())}
        actor = (
            _hub_class()
            .options(
                name=ray_api.HUB_NAME,
                namespace=ray_api.NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                **where,
            )
            .remote(options)
        )
        found = RemoteHub(actor, _finder())
    try:
        found.check(START_S)
    except ConfigError:
        end_hub()  # it would keep what it was told, however often that is mended
        raise
    return found


def _home() -> str:
    """Return the node of a hub with a Redis of its own: the first one in this cluster.

    Raises:
        ConfigError: That node is gone, and what the hub kept with it.
    """
    node = ray_api.noted("hub-node", ray_api.node_id())
    if node not in ray_api.alive_nodes():
        raise ConfigError(
            f"the hub's data is on node {node[:8]}, which is gone from the cluster",
            hint="bring that machine back and restart Ray there, or set AENV_REDIS_URL: such a hub "
            "may run on any node",
        )
    return node


def find_hub() -> RemoteHub | None:
    """Return the cluster's hub; None when there is none."""
    actor = ray_api.find_actor(ray_api.HUB_NAME)
    return None if actor is None else RemoteHub(actor, _finder())


def _finder() -> Callable[[], Any | None]:
    return functools.partial(ray_api.find_actor, ray_api.HUB_NAME)


def end_hub() -> None:
    """End the hub and a Redis of its own; what it keeps stays. Does nothing when there is none."""
    actor = ray_api.find_actor(ray_api.HUB_NAME)
    if actor is None:
        return
    try:
        ray_api.wait(actor.end.remote(), "ending the hub", END_S, lambda _: None, look_s=1.0)
    except FabricUnavailable as exc:
        logger.warning("the hub is killed: %s", exc.message)
    ray_api.kill(actor)
