"""Inner instances: instances of other environments that a host's instances call.

Code in a sandbox has no connection to Ray. It asks its host to call another environment. The host
creates an inner instance for the owner of the outer one, calls it, and ends it with the outer one.

The id of an inner instance is written to the outer instance's record before the inner instance is
created. Therefore a restarted host knows its inner instances, and the cleanup that ends the outer
instance when its host is gone can end them, too.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray import ids, logs
from aenv_ray.actors.calls.json_calls import JsonCall, JsonCalls
from aenv_ray.actors.host.instance import InstanceLife
from aenv_ray.background_tasks import Tasks, start_shared
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    GONE,
    AenvError,
    CallCancelled,
    CallOutcomeUnknown,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InstanceReleased,
    PolicyRefused,
    ToolTimeout,
    is_infrastructure,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceRecord, InstanceSpec
from aenv_ray.project.config import DeployConfig
from aenv_ray.runtime.door.async_calls import CALL_ID, TIMEOUT_S, Disconnect
from aenv_ray.runtime.door.host.inner_environments import CALLS, RELEASE
from aenv_ray.runtime.door.host.link import (
    AFTER_REWARD_METHOD,
    END_PROCESSES_METHOD,
    HELD_S,
    OUTER_REWARDS,
)
from aenv_ray.validation import problems_of

logger = logging.getLogger(__name__)

OUTER_LABEL: Final = "aenv.outer"
"""Label of an inner instance with the id of the instance whose code calls it."""
MAX_DEPTH: Final = 4
"""Instances inside each other, the outermost included."""
MAX_TIMEOUT_S: Final = 86_400.0
_LEAST_TTL_S: Final = 1.0
_LEAST_CALL_S: Final = 0.001
_REMEMBERED: Final = 10_000
_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between attempts to end inner instances; the last one is repeated."""
START_S: Final = 600.0
"""Longest start of an inner instance, the wait for room in a full cluster included. It is no
shorter for a call with less time: an agent may choose that, and the next call would start anew."""
_QUEUE_SHARE: Final = 0.9
"""Share of a call's time for which it waits for a new inner instance that waits for room in a full
cluster. The rest is for the answer: the call must end with `CapacityExceeded`, not at its deadline,
which would be treated as the agent's doing."""
_CANCEL_S: Final = 30.0
"""Longest wait for starts that are given up."""


class InnerInstances(Protocol):
    """Creates and ends instances of other environments, and calls them."""

    @property
    def calls(self) -> JsonCalls:
        """How the instances are called."""
        ...

    async def create(
        self,
        reference: str,
        instance_id: InstanceId,
        outer: InstanceSpec,
        ttl_s: float,
        *,
        take: Callable[[int], None],
        on_queue: Callable[[bool], None],
    ) -> None:
        """Create an instance for the owner of another one, with its labels and its Ray job.

        Args:
            reference: ``name`` or ``name@version``.
            instance_id: The id of the new instance.
            outer: The instance whose code calls it.
            ttl_s: Until the deadline of the outer instance.
            take: Called before the instance is created, with how many inner instances it counts
                for: itself, and those that it may have. What this raises is raised.
            on_queue: Called with True when it begins to wait for room in a full cluster, and with
                False when it has room.

        Raises:
            EnvironmentNotFound: It does not exist, or the owner may not use it.
            CapacityExceeded: There was no room in time.
            AenvError: As `aenv_ray.create`; nothing is left.
        """

    async def renew(self, instance_ids: Sequence[InstanceId], ttl_s: float) -> None:
        """Extend the life of instances."""

    async def release(self, instance_ids: Sequence[InstanceId]) -> None:
        """End instances, in any state; idempotent."""


ConnectInner = Callable[[], Awaitable[InnerInstances]]


class EnvironmentRequest(BaseModel):
    """What environment code may send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: str = Field(max_length=200)
    """Reference of the environment. With `RELEASE`, "" means all inner instances.
    `END_PROCESSES_METHOD` and `AFTER_REWARD_METHOD` always apply to all."""
    key: str = Field(max_length=64)
    method: str
    params: dict[str, Any]
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)
    call_id: str = Field(min_length=1, max_length=100)
    is_for_tool: bool = True
    """Whether a tool of the outer instance, or a process that a tool left running, makes the
    request: an agent may have caused it. False: a function, a reward or a reset makes it. An agent
    that runs code in the runtime can fake False, so this only decides whether lack of room ends the
    instance."""
    rewards: int = -1
    """See `OUTER_REWARDS`."""
    held_s: float = Field(default=0.0, ge=0.0, le=MAX_TIMEOUT_S)
    """See `HELD_S`."""

    @property
    def name(self) -> str:
        """The name of the inner instance within the outer one."""
        return f"{self.environment} {self.key}"


@dataclass
class _Start:
    """An inner instance that is being created, for the calls that wait for it."""

    task: asyncio.Task[None]
    is_queued: bool = False
    """Whether it waits for room in a full cluster."""

    def note_queue(self, is_queued: bool) -> None:
        self.is_queued = is_queued


class EnvironmentRelay:
    """The inner instances of a host's instances. One event loop.

    Args:
        connect: Returns the `InnerInstances`; called once, at the first request.
        store: The store of the host's records.
        clock: The host's clock.
    """

    def __init__(self, connect: ConnectInner, store: InstanceStore, clock: Clock) -> None:
        self._connect = connect
        self._store = store
        self._clock = clock
        self._connection: InnerInstances | None = None
        self._connecting = asyncio.Lock()
        self._creating: dict[InstanceId, _Start] = {}
        self._released: BoundedCache[InstanceId, bool] = BoundedCache(_REMEMBERED)
        """Inner instances that the code of their outer instance has released."""
        self._tasks = Tasks()

    async def answer(
        self, life: InstanceLife, deploy: DeployConfig, params: dict[str, Any]
    ) -> bytes:
        """Return the JSON of an inner instance's answer.

        Args:
            life: The outer instance.
            deploy: ``deployConfig`` of its project.
            params: As `EnvironmentRequest`.

        Raises:
            ConfigError: The request is malformed, or the project does not declare the environment.
            PolicyRefused: It would exceed the number of inner instances, or a limit of nesting.
            ToolTimeout: The inner instance did not start or answer within the time of the call.
                A start goes on, unless it waits for room.
            CapacityExceeded: No node had room during the first 90% of the call's time. If a tool
                asked, that is a ToolTimeout.
            CallCancelled: The outer instance released the inner one meanwhile.
            AenvError: The inner instance cannot be created, or its call failed.
        """
        try:
            request = EnvironmentRequest.model_validate(params)
        except ValidationError as exc:
            raise ConfigError(
                f"malformed request: {problems_of(exc)}",
                hint="call other environments with current_call().env(NAME)",
            ) from None
        if request.method == RELEASE:
            await self._release(life, request)
            return b"{}"
        if request.method in (END_PROCESSES_METHOD, AFTER_REWARD_METHOD):
            await self._tell_of_reward(life, request)
            return b"{}"
        if request.method not in CALLS:
            raise ConfigError(
                f"code of an environment cannot call {request.method!r} of another",
                hint=f"it can call: {', '.join(sorted(CALLS))}",
            )
        check_declared(request.environment, deploy.environments, life.record.spec.reference)
        check_nesting(request.environment, life.record.spec)
        ends_at = asyncio.get_running_loop().time() + request.timeout_s
        inner_id = self._inner(life, deploy.inner_limit, request)
        try:
            await self._started(inner_id, request, ends_at)
            return await self._called(inner_id, request, ends_at)
        except CallOutcomeUnknown as exc:
            # An agent can keep the inner sandbox from answering. That must not void its episode, so
            # it is not an infrastructure failure.
            raise ToolTimeout(
                f"{request.environment} did not answer {request.method} in time: {exc.message}",
                hint=exc.hint,
            ) from exc
        except CapacityExceeded as exc:
            if not request.is_for_tool:
                raise
            # An agent may have chosen how many instances it asks for, and when.
            raise ToolTimeout(
                f"{request.environment} did not start: {exc.message}", hint=exc.hint
            ) from exc
        except AenvError as exc:
            if is_infrastructure(exc) and self._released.get(inner_id):
                # The code of the outer instance released it: that must not void the episode.
                raise CallCancelled(
                    f"{request.environment} was released while it was called",
                    hint="release it after its calls have ended",
                ) from exc
            raise

    async def _tell_of_reward(self, life: InstanceLife, request: EnvironmentRequest) -> None:
        """Tell all inner instances that a reward of the outer one begins, or has ended.

        When it begins, they end the processes of tools.
        """
        ends_at = asyncio.get_running_loop().time() + request.timeout_s

        async def tell(inner_id: InstanceId) -> AenvError | None:
            try:
                await self._called(inner_id, request, ends_at)
            except GONE:
                return None  # its processes are gone, too; a call of the reward will raise
            except CallOutcomeUnknown as exc:
                return ToolTimeout(
                    f"{inner_id} did not answer {request.method}: {exc.message}",
                    hint="give the reward a longer timeout",
                )
            except AenvError as exc:
                return exc
            return None

        async with asyncio.TaskGroup() as group:
            running = [one for one in life.record.inner.values() if one not in self._creating]
            tasks = [group.create_task(tell(inner_id)) for inner_id in running]
        for failure in filter(None, (task.result() for task in tasks)):
            raise failure

    async def _called(
        self, inner_id: InstanceId, request: EnvironmentRequest, ends_at: float
    ) -> bytes:
        left_s = max(_LEAST_CALL_S, ends_at - asyncio.get_running_loop().time())
        meta = {CALL_ID: request.call_id, TIMEOUT_S: left_s}
        own: dict[str, Any] = {OUTER_REWARDS: request.rewards}
        if request.method == END_PROCESSES_METHOD:
            own[HELD_S] = request.held_s
        call = JsonCall(inner_id, request.method, request.params, meta, own_meta=own)
        calls = (await self._inner_instances()).calls
        # The environment's code chooses the call id. With the instance id as prefix, it cannot
        # collide with a call of another instance.
        name = f"{inner_id}\n{request.call_id}"
        try:
            return await calls.call(call, Disconnect(), name)
        except asyncio.CancelledError:
            # A call with an id continues when its caller is cancelled, so cancel it explicitly.
            self._in_background(calls.cancel(inner_id, name), f"cancelling a call of {inner_id}")
            raise

    async def _inner_instances(self) -> InnerInstances:
        async with self._connecting:
            if self._connection is None:
                self._connection = await self._connect()
            return self._connection

    def _inner(self, life: InstanceLife, limit: int, request: EnvironmentRequest) -> InstanceId:
        """Return the inner instance of a name; begin to create it if there is none."""
        known = life.record.inner.get(request.name)
        if known is None:
            self._take(life, limit, request, 1)
            name, _ = ids.split_reference(request.environment)
            known = ids.new_instance_id(name)
            self._note(life, {**life.record.inner, request.name: known})
            creating = start_shared(self._create(life, limit, request, known))
            self._creating[known] = _Start(creating)
            creating.add_done_callback(functools.partial(self._forget_start, known))
        return known

    def _forget_start(self, inner_id: InstanceId, task: asyncio.Task[None]) -> None:
        del self._creating[inner_id]
        if not task.cancelled():
            task.exception()  # retrieved: its calls may all be cancelled, and nobody waits for it

    def _take(
        self, life: InstanceLife, limit: int, request: EnvironmentRequest, places: int
    ) -> None:
        """Count an inner instance; it was counted in the quotas with the outermost one.

        Raises:
            PolicyRefused: The instance may not have as many.
        """
        counted = life.record.inner_places
        others = sum(counted.get(name, 1) for name in life.record.inner if name != request.name)
        if others + places > limit:
            own = f", {places - 1} of its own included" if places > 1 else ""
            raise PolicyRefused(
                f"{life.record.id} may have {limit} inner instances, and has {others}: "
                f"no room for {places} more ({request.environment}{own})",
                hint="release those that it no longer needs, or raise deployConfig.innerInstances "
                f"of {life.record.spec.reference}",
            )
        inner_places = {**counted, request.name: places}
        life.record = life.record.model_copy(update={"inner_places": inner_places})
        if places > 1:
            self._note(life, life.record.inner)

    async def _started(
        self, inner_id: InstanceId, request: EnvironmentRequest, ends_at: float
    ) -> None:
        """Wait until an inner instance is up; another call may have begun to create it."""
        start = self._creating.get(inner_id)
        if start is None:
            return
        left_s = ends_at - asyncio.get_running_loop().time()
        for share in (_QUEUE_SHARE, 1.0 - _QUEUE_SHARE):
            # A call that is cancelled does not end it: others may wait for it, too.
            await asyncio.wait({start.task}, timeout=share * left_s)
            if start.task.cancelled():
                raise _released_early(inner_id)
            if start.task.done():
                start.task.result()
                return
            if start.is_queued:
                raise CapacityExceeded(
                    f"no room for {request.environment} in the cluster within {left_s:g} s",
                    hint="give the cluster more nodes, lower the concurrency, or give the call a "
                    "longer timeout",
                )
        raise ToolTimeout(
            f"{request.environment} did not start within the {request.timeout_s:g} s of the call",
            hint="give the call a longer timeout, or call again: the start goes on",
        )

    async def _create(
        self, life: InstanceLife, limit: int, request: EnvironmentRequest, inner_id: InstanceId
    ) -> None:
        record = life.record
        try:
            ttl_s = max(_LEAST_TTL_S, record.deadline - self._clock.now())
            async with asyncio.timeout(START_S):
                inner = await self._inner_instances()
                await inner.create(
                    request.environment,
                    inner_id,
                    record.spec,
                    ttl_s,
                    take=lambda places: self._take(life, limit, request, places),
                    on_queue=self._creating[inner_id].note_queue,
                )
            extra = logs.of_instance(record.id, record.spec.owner)
            logger.info("%s created %s", record.id, inner_id, extra=extra)
        except BaseException as exc:
            left = {n: i for n, i in life.record.inner.items() if i != inner_id}
            self._note(life, left)
            if isinstance(exc, TimeoutError) and not isinstance(exc, AenvError):
                raise FabricUnavailable(
                    f"{request.environment} did not start within the {START_S:g} s that an inner "
                    "instance has",
                    hint="see how it starts with: aenv test --check",
                ) from None
            raise
        if life.ended is not None or self._released.get(inner_id):
            self._in_background(self._end_surely(life.record, [inner_id]), f"ending {inner_id}")
            raise _released_early(inner_id)
        if life.record.deadline > record.deadline:
            self.renew(life, life.record.deadline - self._clock.now())

    def _note(self, life: InstanceLife, inner: dict[str, InstanceId]) -> None:
        counted = life.record.inner_places
        update = {"inner": inner, "inner_places": {n: p for n, p in counted.items() if n in inner}}
        life.record = life.record.model_copy(update=update)
        if life.ended is None:
            self._store.put([life.record])

    async def _release(self, life: InstanceLife, request: EnvironmentRequest) -> None:
        inner = life.record.inner
        ending = {n: i for n, i in inner.items() if n == request.name or not request.environment}
        if ending:
            for inner_id in ending.values():
                self._released.put(inner_id, True)
            # If the call is cancelled, the record must still be updated.
            await asyncio.shield(self._tasks.spawn(self._end_released(life, ending)))

    async def _end_released(self, life: InstanceLife, ending: dict[str, InstanceId]) -> None:
        try:
            await self._give_up(list(ending.values()))
            await self._end(list(ending.values()))
        except BaseException:
            for inner_id in ending.values():
                self._released.pop(inner_id)
            raise
        left = {n: i for n, i in life.record.inner.items() if i not in ending.values()}
        self._note(life, left)

    def renew(self, life: InstanceLife, ttl_s: float) -> None:
        """Extend the lives of the inner instances of an instance that was renewed."""
        if life.record.inner:
            self._in_background(
                self._renew_those_of(life.record, ttl_s),
                f"renewing the inner instances of {life.record.id}",
            )

    async def _renew_those_of(self, record: InstanceRecord, ttl_s: float) -> None:
        inner = await self._inner_instances()
        for instance_id in record.inner.values():
            try:
                await inner.renew([instance_id], ttl_s)
            except AenvError as exc:  # this one has ended; renew the others
                extra = logs.of_instance(instance_id, record.spec.owner)
                logger.warning("%s was not renewed: %s", instance_id, exc, extra=extra)

    def end(self, record: InstanceRecord) -> None:
        """End the inner instances of an instance that has ended, and then delete its record.

        Until then the record is in the store, as `InstanceTable` leaves it: if this host dies, its
        successor or the controller ends them.
        """
        if record.inner:
            self._in_background(
                self._end_those_of(record), f"ending the inner instances of {record.id}"
            )

    async def _end_those_of(self, record: InstanceRecord) -> None:
        inner = list(record.inner.values())
        await self._give_up(inner)
        try:
            await self._end_surely(record, inner)
        except AenvError as exc:
            extra = logs.of_instance(record.id, record.spec.owner)
            logger.warning("%s end at their deadlines: %s", inner, exc, extra=extra)
        self._store.delete([record.id])

    async def _give_up(self, instance_ids: Sequence[InstanceId]) -> None:
        """Cancel the starts among some inner instances; what they have created is ended."""
        starts = [self._creating[one].task for one in instance_ids if one in self._creating]
        for start in starts:
            start.cancel()
        if starts:
            await asyncio.wait(starts, timeout=_CANCEL_S)

    async def _end_surely(self, outer: InstanceRecord, instance_ids: Sequence[InstanceId]) -> None:
        """End inner instances; try again until they have reached their deadline."""
        for attempt in itertools.count():
            try:
                await self._end(instance_ids)
            except AenvError as exc:
                if self._clock.now() > outer.deadline:
                    raise
                pause_s = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                logger.warning("cannot end %s, next try in %g s: %s", instance_ids, pause_s, exc)
                await asyncio.sleep(pause_s)
            else:
                return

    async def _end(self, instance_ids: Sequence[InstanceId]) -> None:
        await (await self._inner_instances()).release(instance_ids)

    @property
    def is_busy(self) -> bool:
        """Whether background work is under way, such as ending instances."""
        return bool(self._tasks or self._creating)

    def _in_background(self, work: Awaitable[None], what: str) -> None:
        async def run() -> None:
            try:
                await work
            except AenvError as exc:  # the instances end at their deadlines
                logger.warning("%s failed: %s", what, exc)

        self._tasks.spawn(run())


def check_declared(reference: str, declared: Sequence[str], outer: str) -> None:
    """Check that a project declares an environment that it calls.

    Raises:
        ConfigError: The environment is not declared; the hint says how to declare it.
    """
    name, _ = ids.split_reference(reference)
    if reference not in declared and name not in declared:
        raise ConfigError(
            f"{outer} may not call {reference} (declared: {', '.join(declared) or 'none'})",
            hint=f'add "{reference}" to deployConfig.environments in its config.json',
        )


def check_nesting(reference: str, outer: InstanceSpec) -> None:
    """Check that an instance may have an inner one of an environment.

    Raises:
        PolicyRefused: The nesting would be too deep, or the environment would call itself.
    """
    chain = [*outer.outer, outer.reference]
    name, _ = ids.split_reference(reference)
    path = " calls ".join([*chain, reference])
    if name in {ids.split_reference(one)[0] for one in chain}:
        raise PolicyRefused(
            f"environments may not call themselves in a loop: {path}",
            hint="call an environment that calls none of the outer ones",
        )
    if len(chain) >= MAX_DEPTH:
        raise PolicyRefused(
            f"environments may be nested at most {MAX_DEPTH} deep: {path}",
            hint="call the innermost environment from an outer one",
        )


def _released_early(inner_id: InstanceId) -> InstanceReleased:
    return InstanceReleased(
        f"inner instance {inner_id} was released while it started",
        instance_id=inner_id,
        hint="call the environment again, which creates another one",
    )
