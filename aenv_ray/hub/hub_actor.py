"""The hub actor: one detached actor of the cluster with the connection to Redis.

It holds no other state, so it may die at any time: Ray restarts it, and Redis has everything that
it acknowledged. If ``AENV_REDIS_URL`` is unset, it runs the bundled Redis and therefore stays on
the node that has the data.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray import logs
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.ray_metrics import Histogram
from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock
from aenv_ray.config import settings
from aenv_ray.daemon import protect_from_oom_killer
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, InternalError
from aenv_ray.hub.client import HubClient
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.keys import DEFAULT_PREFIX
from aenv_ray.hub.leases import SWEEP_AT_ONCE
from aenv_ray.hub.ray_leases import MADE_BY_RAY, changes
from aenv_ray.hub.records import LeaseQuery
from aenv_ray.hub.redis.connection import connect, redacted
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.models import InstanceStatus

logger = logging.getLogger(__name__)

LATENCY: Final = "aenv_hub_seconds"
"""Name of the metric of operations; Ray exports it with the prefix ``ray_``."""
_BUCKETS_S: Final = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0]
SWEEP_S: Final = 5.0
"""Interval of the sweep for overdue leases, which also notices that the bundled Redis died."""
COMPARE_TURNS: Final = 6
"""One sweep in this many compares leases with the running instances."""
COMPARE_S: Final = 40.0
"""Deadline of the controller's answer; it waits up to 30 s for hosts that do not answer."""
END_S: Final = 20.0
"""Longest shutdown, in which Redis writes its data."""
START_S: Final = 120.0
"""Longest start: of a Ray worker, and of a Redis that reads a large data set."""


class HubSettings(BaseModel):
    """Settings of the hub, fixed when it is created; they survive restarts."""

    model_config = ConfigDict(frozen=True)

    redis_url: str | None = Field(default=None, repr=False)
    """None for the bundled Redis."""
    redis_password: str | None = Field(default=None, repr=False)
    """Password of a `redis_url` that contains none."""
    prefix: str = DEFAULT_PREFIX
    data_dir: Path
    runtime_dir: Path

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Complete the fields that an earlier version pickled.

        After an upgrade of the head, Ray restarts the actor with the arguments of its creation.
        """
        fields = type(self).model_fields.items()
        defaults = {name: field.default for name, field in fields if not field.is_required()}
        super().__setstate__({**state, "__dict__": defaults | state["__dict__"]})


class HubActor:
    """The actor: it holds the connection to Redis and sweeps the leases."""

    def __init__(self, options: HubSettings, clock: Clock | None = None) -> None:
        protect_from_oom_killer()
        logs.configure("hub")
        self._options = options
        self._clock = clock
        self._server = (
            RedisServer(options.data_dir, options.runtime_dir)
            if options.redis_url is None
            else None
        )
        self._core: HubCore | None = None
        self._is_doubtful = True
        self._seconds = Histogram(
            LATENCY, "Duration of the hub's operations", _BUCKETS_S, ("outcome",)
        )
        # Ray runs the constructor on the actor's loop, also after a restart that nobody notices.
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Run a method of `HubCore`.

        Raises:
            FabricUnavailable: Redis does not answer.
            AenvError: What the method raises.
        """
        begin = time.monotonic()
        outcome = InternalError.code
        try:
            core = await self._ready()
            result = await getattr(core, method)(*arguments, **options)
            outcome = "ok"
            return result
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except AenvError as exc:
            outcome = exc.code
            if isinstance(exc, FabricUnavailable):
                self._is_doubtful = True
            raise
        finally:
            self._seconds.observe(time.monotonic() - begin, tags={"outcome": outcome})

    async def compare(self) -> None:
        """Compare the leases of Ray code with the running instances, and correct the leases.

        Raises:
            FabricUnavailable: Redis or the controller does not answer; no lease was ended.
        """
        hub = await self._ready()
        leases = [lease async for lease in hub.all_leases(LeaseQuery(label=MADE_BY_RAY))]
        if not any(lease.status is InstanceStatus.RUNNING for lease in leases):
            return
        controller = await asyncio.to_thread(ray_api.find_actor, ray_api.CONTROLLER_NAME)
        if controller is None:
            return  # without it nobody knows which instances run
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
        """Disconnect from Redis; a bundled one without other users ends. Kill the actor next."""
        await end_task(self._sweeper)  # it may hold a connection
        if self._core is not None:
            await self._core.close()
        if self._server is not None:
            await self._server.end()

    async def _ready(self) -> HubCore:
        """Return the core, after starting the bundled Redis if it may not be running."""
        if self._server is not None and self._is_doubtful:
            await self._server.ensure()
        core = self._core or await self._connect()
        self._is_doubtful = False
        return core

    async def _connect(self) -> HubCore:
        """Connect to Redis and check its data; concurrent calls all get the first connection."""
        url = self._options.redis_url
        password = self._options.redis_password
        client = connect(url, password=password) if url is not None else self._connect_bundled()
        where = redacted(url) if url is not None else "the hub's own"
        core = HubCore(client, self._clock, prefix=self._options.prefix, where=where)
        try:
            await core.check_layout()
            await core.renew_indexes()
            if self._core is None:
                self._core = core
            return self._core
        finally:
            if core is not self._core:
                await core.close()

    def _connect_bundled(self) -> Any:
        assert self._server is not None
        return self._server.connect()

    async def _sweep_for_ever(self) -> None:
        """Sweep and compare until the actor ends."""
        for turn in itertools.count():
            await self._attempt("sweeping the leases", self._sweep)
            if turn % COMPARE_TURNS == 0:
                await self._attempt("comparing the leases with the instances", self.compare)
            await asyncio.sleep(SWEEP_S)

    async def _sweep(self) -> None:
        while await self.call("sweep") >= SWEEP_AT_ONCE:
            pass

    @staticmethod
    async def _attempt(what: str, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except (AenvError, TimeoutError) as exc:
            logger.warning("%s failed, will retry: %r", what, exc)
        except Exception:
            logger.exception("%s failed, will retry", what)


@functools.cache
def _hub_class() -> Any:
    return ray_api.restartable_actor(HubActor, max_concurrency=1000)


def ensure_hub() -> HubClient:
    """Return the hub of the cluster that this process is connected to; start it if necessary.

    Raises:
        ConfigError: Redis refuses the connection, its URL is malformed, or no redis-server was
            found.
        FabricUnavailable: The hub does not start.
    """
    found = find_hub()
    if found is None:
        given = settings()
        options = HubSettings(
            redis_url=given.redis_url,
            redis_password=given.redis_password,
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
        found = HubClient(actor, _finder())
    try:
        found.check(START_S)
    except ConfigError:
        end_hub()  # it would keep these settings even if they were corrected
        raise
    return found


def _home() -> str:
    """Return the node of a hub with the bundled Redis: the one where it was first started.

    Raises:
        ConfigError: That node has left the cluster, and the data with it.
    """
    node = ray_api.store_once("hub-node", ray_api.node_id())
    if node not in ray_api.alive_nodes():
        raise ConfigError(
            f"the hub's data is on node {node[:8]}, which is gone from the cluster",
            hint="bring that machine back and restart Ray there, or set AENV_REDIS_URL: with an "
            "external Redis the hub may run on any node",
        )
    return node


def find_hub() -> HubClient | None:
    """Return the hub of the cluster, or None."""
    actor = ray_api.find_actor(ray_api.HUB_NAME)
    return None if actor is None else HubClient(actor, _finder())


def _finder() -> Callable[[], Any | None]:
    return functools.partial(ray_api.find_actor, ray_api.HUB_NAME)


def end_hub() -> None:
    """End the hub and its bundled Redis, if they run; the data stays."""
    actor = ray_api.find_actor(ray_api.HUB_NAME)
    if actor is None:
        return
    try:
        ray_api.wait(actor.end.remote(), "ending the hub", END_S, lambda _: None, look_s=1.0)
    except FabricUnavailable as exc:
        logger.warning("the hub does not end by itself and is killed: %s", exc.message)
    ray_api.kill(actor)
