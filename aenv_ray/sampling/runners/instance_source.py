"""The instances of a runner: created in batches ahead of need, released in batches behind it.

`StartPlan` decides how many to create; `InstanceSource` creates them and hands them out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from aenv_ray.actors.fabric.create_options import OwnOptions
from aenv_ray.actors.fabric.create_protocol import Created, CreateListener, OnQueue
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import AenvError

logger = logging.getLogger("aenv_ray")

MOST_AHEAD: Final = 64
"""Maximum number of instances that are started before an episode asks for them."""
REUSED_SHARE: Final = 0.25
"""Share of its time to live in which an instance is reused; the last episode has what is left."""
STALE_S: Final = 20.0
"""An instance that waited longer than this is replaced: its time to live passes meanwhile, and it
occupies a place in the cluster for which others may wait."""
_SWEEP_S: Final = 1.0
"""Least time between looks for these."""
_REQUESTS: Final = 2
"""Requests for instances under way, apart from those that wait for room in the cluster. What is
needed meanwhile becomes the next request, so that requests grow with the rate of episodes."""
_SMOOTHING: Final = 0.2


class Instances(Protocol):
    """Creates and releases instances; see `aenv_ray.actors.fabric.instance_batches`."""

    async def create(self, count: int, listener: CreateListener) -> None:
        """See `InstanceBatches.create`."""

    async def create_group(
        self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
    ) -> list[Created]:
        """See `InstanceBatches.create_group`."""

    async def release(self, instances: Sequence[Created]) -> None:
        """See `InstanceBatches.release`."""


class StartPlan:
    """Decides how many instances to start ahead of need.

    Enough for the episodes that begin while an instance starts: with short episodes there is always
    an instance ready, and with long ones none waits idle.

    Args:
        concurrency: Maximum number of episodes at once. As many instances may be started ahead,
            or be in release.
        is_eager: Start an instance for every episode that has not begun, whatever their rate.
    """

    def __init__(self, concurrency: int, *, is_eager: bool = False) -> None:
        self._is_eager = is_eager
        self.resize(concurrency)
        self.reuses = False
        """Instances are used again, so none is needed ahead of its episode."""
        self._start_s = 0.0
        self._interval_s = math.inf
        self._last_need = -math.inf

    def resize(self, concurrency: int) -> None:
        """Change the maximum number of episodes at once."""
        self._most_ahead = min(concurrency, MOST_AHEAD)
        self.most = concurrency + self._most_ahead
        """Maximum number of instances at once, in whatever state."""

    def needed(self, now: float) -> None:
        """Note that an episode needs an instance."""
        interval_s = now - self._last_need
        self._last_need = now
        if math.isinf(self._interval_s):
            self._interval_s = interval_s
        else:
            self._interval_s += _SMOOTHING * (interval_s - self._interval_s)

    def started(self, seconds: float) -> None:
        """Note how long the start of an instance took."""
        self._start_s += (_SMOOTHING if self._start_s else 1.0) * (seconds - self._start_s)

    def count(self, *, waiting: int, ready: int, starting: int, live: int, left: int | None) -> int:
        """Return how many instances to start now.

        Args:
            waiting: Episodes that wait for one.
            ready: Instances that wait for an episode.
            starting: Instances that are being started.
            live: Instances in any state.
            left: Episodes that have not begun yet; None if that is unknown.
        """
        if self.reuses and not self._is_eager:
            return max(0, min(waiting - ready - starting, self.most - live))
        ahead = self._most_ahead
        if not self._is_eager:
            ahead = min(ahead, int(self._start_s / max(self._interval_s, 1e-6)))
        if left is not None:
            ahead = min(ahead, left)
        return max(0, min(waiting + ahead - ready - starting, self.most - live))


class Instance(NamedTuple):
    """An instance for one episode."""

    env: AsyncEnvHandle
    created: Created
    create_s: float
    """How long its start took, including the wait for room; 0 if it is used again."""
    since: float
    """When it had started, on the source's clock."""
    is_used: bool = False
    """Whether an episode has used it: it must be reset."""
    is_for_task: bool = False
    """Whether it has the options of a task: it serves one episode."""


class _Ready(NamedTuple):
    instance: Instance
    since: float


class _GroupRequest:
    """A group that waits for its instances: new ones, or as many as episodes have given back.

    Args:
        count: How many it needs.
    """

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self.count = count
        self._clock = clock
        self.instances: asyncio.Future[list[Instance]] = asyncio.get_running_loop().create_future()
        self.reserved = 0
        """How many ready instances it gets besides those that are created for it."""
        self.creating: asyncio.Task[list[Instance]] | None = None
        self.queued_at: float | None = None
        """When these began to wait for room in the cluster; None: they do not wait."""

    def on_queue(self, is_queued: bool) -> None:
        if not is_queued:
            self.queued_at = None
        elif self.queued_at is None:
            self.queued_at = self._clock()


class InstanceSource:
    """Hands out instances, each to one episode. Use it on one event loop.

    Args:
        instances: Creates and releases them.
        attach: Returns the handle with which an episode calls an instance.
        concurrency: Maximum number of episodes at once; see `resize`.
        left: Returns how many episodes have not begun yet; None if that is unknown.
        is_eager: Start instances for all of those, and keep them while a trainer trains.
    """

    def __init__(
        self,
        instances: Instances,
        attach: Callable[[Created], AsyncEnvHandle],
        *,
        concurrency: int,
        left: Callable[[], int | None],
        is_eager: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._attach = attach
        self._plan = StartPlan(concurrency, is_eager=is_eager)
        self._is_eager = is_eager
        self._left = left
        self._clock = clock
        self._waiting: deque[asyncio.Future[Instance]] = deque()
        self._ready: deque[_Ready] = deque()
        """While groups wait, these are for the first of them."""
        self._group_requests: deque[_GroupRequest] = deque()
        """Groups that wait for instances."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._requests: set[_Request] = set()
        self._group_starts: set[asyncio.Task[list[Instance]]] = set()
        self._live = 0
        self._queued_in_groups = 0
        self._ended: list[Instance] = []
        self._connected: set[str] = set()
        """Instances with a direct connection."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_connected = soft // 4
        """A connection takes two descriptors, and most of them are left to the policies."""
        self._releaser: asyncio.Task[None] | None = None
        self._is_ordering = False
        self._is_closed = False

    def resize(self, concurrency: int) -> None:
        """Change the maximum number of episodes at once."""
        self._plan.resize(concurrency)

    @property
    def queued(self) -> int:
        """How many episodes wait for room in the cluster: not those that have not begun."""
        queued = sum(request.queued for request in self._requests)
        return self._queued_in_groups + min(queued, len(self._waiting))

    def start_ahead(self) -> None:
        """Start instances for episodes that have not begun; call it when more may be started."""
        self._order()

    async def acquire(self, own: OwnOptions | None = None) -> Instance:
        """Return an instance for an episode, once one runs.

        Args:
            own: Options of its task. Such an instance is started for this episode alone.

        Raises:
            AenvError: It does not start; as `aenv_ray.create`.
        """
        if own is not None:
            return await _one_of(self, self.begin_group(1, own))
        self._plan.needed(self._clock())
        found = None if self._group_requests else self._take_ready()
        if found is not None:
            self._order()
            return found
        future: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._order()
        try:
            return await future
        except asyncio.CancelledError:
            if future in self._waiting:
                self._waiting.remove(future)
            elif not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise

    def begin_group(
        self, count: int, own: OwnOptions | None = None
    ) -> asyncio.Future[list[Instance]]:
        """Begin to start instances, all or none; the caller releases each.

        Those that episodes give back are used as well. If the cluster is full, the group keeps none
        of them for long: other groups, also of other runners, may wait for their places.
        """
        if own is not None:
            return self._begin_create(count, own)
        group = _GroupRequest(count, self._clock)
        self._group_requests.append(group)
        self._drop_stale()
        self._serve()
        if not group.instances.done():
            group.reserved = len(self._ready) if self._group_requests[0] is group else 0
            self._create_for(group)
            self._sweep_later()
        return group.instances

    def _create_for(self, group: _GroupRequest) -> None:
        """Create the instances that a group has not reserved, in place of those before."""
        if group.creating is not None:
            group.creating.cancel()
        group.queued_at = None
        missing = group.count - group.reserved
        group.creating = self._begin_create(missing, None, group.on_queue)
        group.creating.add_done_callback(lambda done: self._on_created(group, done))

    def _on_created(self, group: _GroupRequest, done: asyncio.Task[list[Instance]]) -> None:
        """The instances that were created for a group run, or have failed."""
        if done.cancelled():
            return
        error = done.exception()
        if group.instances.done() or done is not group.creating:
            # In the same turn, the group was served, or gave up what it had reserved.
            for one in [] if error else done.result():
                self.give_back(one)
            return
        self._group_requests.remove(group)
        if error is None:
            found = [self._ready.popleft().instance for _ in range(group.reserved)]
            group.instances.set_result(found + done.result())
        else:
            group.instances.set_exception(error)
        self._serve()

    def _serve(self) -> None:
        """Hand ready instances to groups for which they are enough, or if none waits, to others."""
        while self._group_requests and len(self._ready) >= self._group_requests[0].count:
            group = self._group_requests.popleft()
            group.instances.set_result([self._ready.popleft().instance for _ in range(group.count)])
            if group.creating is not None:
                group.creating.cancel()
        while self._ready and not self._group_requests and (waiting := self._next_waiting()):
            waiting.set_result(self._ready.popleft().instance)

    def _begin_create(
        self, count: int, own: OwnOptions | None, on_queue: OnQueue = lambda _: None
    ) -> asyncio.Task[list[Instance]]:
        task = asyncio.create_task(self._create(count, own, on_queue))
        self._group_starts.add(task)
        task.add_done_callback(self._group_starts.discard)
        return task

    async def _create(
        self, count: int, own: OwnOptions | None, on_queue: OnQueue
    ) -> list[Instance]:
        self._live += count
        started = self._clock()
        queued = 0
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def note(is_queued: bool) -> None:
            # It is also called in a thread, which goes on when this is cancelled.
            loop.call_soon_threadsafe(count_queued, is_queued)

        def count_queued(is_queued: bool) -> None:
            nonlocal queued
            if task.done() or task.cancelling():
                return
            now_queued = count if is_queued else 0
            self._queued_in_groups += now_queued - queued
            queued = now_queued
            on_queue(is_queued)

        try:
            created = await self._instances.create_group(count, own, note)
        except BaseException:
            self._live -= count
            raise
        finally:
            self._queued_in_groups -= queued
        seconds = self._clock() - started
        made = [self._instance(one, seconds) for one in created]
        return [one._replace(is_for_task=own is not None) for one in made]

    def _instance(self, created: Created, seconds: float) -> Instance:
        return Instance(self._attach(created), created, seconds, self._clock())

    def _take_ready(self) -> Instance | None:
        self._drop_stale()
        return self._ready.popleft().instance if self._ready else None

    def _drop_stale(self) -> None:
        if self._group_requests and self._group_requests[0].reserved:
            return  # it counts on all of them
        while self._ready and self._is_stale(self._ready[0]):
            self.release(self._ready.popleft().instance)

    def _is_stale(self, ready: _Ready) -> bool:
        """Return whether an instance has waited too long; a trainer's waits for its next step."""
        since, stale_s = ready.since, STALE_S
        if self._is_eager:
            queued_at = self._group_requests[0].queued_at if self._group_requests else None
            if queued_at is None:
                stale_s = REUSED_SHARE * ready.instance.created.spec.ttl_s
            else:
                since = max(since, queued_at)
        return self._clock() - since > stale_s

    def _sweep_later(self) -> None:
        is_due = not self._is_eager or bool(self._group_requests)
        if self._ready and self._sweeper is None and is_due:
            left_s = self._ready[0].since + STALE_S - self._clock()
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(max(_SWEEP_S, left_s), self._sweep)

    def _sweep(self) -> None:
        """Release instances that have been ready for long: others may wait for their places."""
        self._sweeper = None
        group = self._group_requests[0] if self._group_requests else None
        is_stale = bool(self._ready) and self._is_stale(self._ready[0])
        if group is not None and group.reserved and group.queued_at is not None and is_stale:
            # Groups that lack each other's places would wait until their time is over.
            group.reserved = 0
            self._drop_stale()
            self._create_for(group)
        else:
            self._drop_stale()
        self._sweep_later()

    async def connect(self, instance: Instance) -> None:
        """Connect to an instance directly, unless it is connected; see `_most_connected`.

        An episode without a connection calls through the host.
        """
        instance_id = instance.env.instance_id
        if instance_id in self._connected or instance.created.introduction is None:
            return
        if len(self._connected) < self._most_connected:
            self._connected.add(instance_id)
            await instance.env.connect_directly()

    def release(self, instance: Instance) -> None:
        """Disconnect from an instance and release it; it counts as live until it is gone."""
        self._connected.discard(instance.env.instance_id)
        self._ended.append(instance)
        if self._releaser is None or self._releaser.done():
            self._releaser = asyncio.create_task(self._release_ended())

    def give_back(self, instance: Instance) -> None:
        """Take back an instance that was not used; after `close` it is released."""
        if self._is_closed:
            self.release(instance)
        else:
            self._hand_out(instance)

    def reuse(self, instance: Instance) -> bool:
        """Keep an instance for another episode, which resets it; False if it has to be released."""
        is_old = self._clock() - instance.since > REUSED_SHARE * instance.created.spec.ttl_s
        is_full = len(self._ready) >= self._plan.most
        if self._is_closed or instance.is_for_task or is_old or is_full:
            return False
        self._plan.reuses = True
        self._hand_out(instance._replace(is_used=True, create_s=0.0))
        self._sweep_later()
        return True

    async def _release_ended(self) -> None:
        """Release instances until none is left; what ends meanwhile is the next batch."""
        while self._ended:
            batch, self._ended = self._ended, []
            try:
                for one in batch:
                    await one.env.close()
                await self._instances.release([one.created for one in batch])
            except* AenvError as group:
                # Their node is lost; the launcher's deadline and the controller clean up.
                logger.info("%d instances were not released: %s", len(batch), group.exceptions[0])
            finally:
                self._live -= len(batch)
                self._order()

    async def close(self) -> None:
        """Release all instances, and wait until they are gone."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for group in self._group_requests:
            group.instances.cancel()
        running: list[asyncio.Task[Any]] = [request.task for request in self._requests]
        running += self._group_starts
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        while self._ready:
            self.release(self._ready.popleft().instance)
        if self._releaser is not None:
            await asyncio.wait([self._releaser])

    # --- starting -------------------------------------------------------------------------------

    def _order(self) -> None:
        """Request instances soon: episodes that begin in the same turn share a request."""
        if not self._is_ordering:
            self._is_ordering = True
            asyncio.get_running_loop().call_soon(self._request)

    def _request(self) -> None:
        """Request the instances that are needed now, unless enough requests are under way."""
        self._is_ordering = False
        is_queued = any(request.queued for request in self._requests)
        if self._is_closed or sum(not r.queued for r in self._requests) >= _REQUESTS:
            return
        starting = sum(request.pending for request in self._requests)
        count = self._plan.count(
            waiting=len(self._waiting),
            ready=0 if self._group_requests else len(self._ready),
            starting=starting,
            live=self._live,
            left=0 if is_queued else self._left(),
        )
        if count:
            self._live += count
            request = _Request(self, count)
            self._requests.add(request)
            request.task = asyncio.create_task(self._run(request))

    async def _run(self, request: _Request) -> None:
        try:
            await self._instances.create(request.pending, request)
        except Exception as exc:  # noqa: BLE001  # each episode that waits for it raises it
            while request.pending:
                request.on_outcome(exc)
        finally:
            self._live -= request.pending
            self._requests.discard(request)
            self._order()

    def on_started(self, created: Created, seconds: float) -> None:
        """An instance runs."""
        self._plan.started(seconds)
        instance = self._instance(created, seconds)
        if self._is_closed:
            self.release(instance)
        else:
            self._hand_out(instance)

    def _hand_out(self, instance: Instance) -> None:
        waiting = self._next_waiting()
        if waiting is not None:
            waiting.set_result(instance)
            return
        self._ready.append(_Ready(instance, self._clock()))
        if self._group_requests:
            self._serve()
            self._sweep_later()

    def on_failed(self, error: Exception) -> None:
        """An instance did not start."""
        self._live -= 1
        waiting = self._next_waiting()
        if waiting is None:
            logger.info("an instance that was started ahead of need failed: %s", error)
        else:
            waiting.set_exception(error)

    def _next_waiting(self) -> asyncio.Future[Instance] | None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                return future
        return None


class _Request(CreateListener):
    """A request for instances, and what becomes of each."""

    task: asyncio.Task[None]

    def __init__(self, source: InstanceSource, count: int) -> None:
        self._source = source
        self._started = time.monotonic()
        self.pending = count
        """Instances without an outcome."""
        self.queued = 0
        """Instances among them that wait for room in the cluster."""

    def on_outcome(self, outcome: Created | Exception) -> None:
        self.pending -= 1
        if isinstance(outcome, Created):
            self._source.on_started(outcome, time.monotonic() - self._started)
        else:
            self._source.on_failed(outcome)

    def on_queued(self, count: int) -> None:
        self.queued += count
        self._source.start_ahead()  # requests that wait for room do not hold up the next

    def on_placed(self, count: int) -> None:
        self.queued -= count


class GroupStart:
    """The start of the episodes of one group: all of them get their instances, or none does.

    Args:
        size: Number of episodes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._starts: dict[int, asyncio.Future[list[Instance]]] = {}
        self._has_begun = False

    async def take(
        self, source: InstanceSource, tries: int, own: OwnOptions | None = None
    ) -> Instance:
        """Return the instance of one episode.

        Args:
            source: Provides the instances.
            tries: How often the episode has asked before. Until the group has begun, its episodes
                fail and ask again together; afterwards each asks alone.
            own: Options of their task.

        Raises:
            AenvError: As `aenv_ray.create_many`.
        """
        start = self._starts.get(tries)
        if start is None:
            if self._size == 1 or self._has_begun:
                return await source.acquire(own)
            start = self._starts[tries] = source.begin_group(self._size, own)
        instance = await _one_of(source, start)
        self._has_begun = True
        return instance


async def _one_of(source: InstanceSource, start: asyncio.Future[list[Instance]]) -> Instance:
    """Return one of the instances of a start; if it is cancelled meanwhile, release one."""
    try:
        return (await asyncio.shield(start)).pop()
    except asyncio.CancelledError:
        start.add_done_callback(lambda done: _release_one(source, done))
        raise


def _release_one(source: InstanceSource, start: asyncio.Future[list[Instance]]) -> None:
    """Release the instance of an episode that was cancelled while its group started."""
    if not start.cancelled() and start.exception() is None:
        source.release(start.result().pop())
