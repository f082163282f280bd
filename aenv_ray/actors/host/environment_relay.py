"""Inner instances: instances of other environments that a host's instances call.

Code in a sandbox has no connection to Ray. It asks its host to call another environment. The host
creates an inner instance for the owner of the outer one, calls it, and ends it with the outer one.

The id of an inner instance is written to the outer instance's record before the inner instance is
created. Therefore a restarted host knows its inner instances, and the cleanup that ends the outer
instance when its host is gone can end them, too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray import ids
from aenv_ray.actors.calls.json_calls import JsonCall, JsonCalls
from aenv_ray.actors.host.instance import InstanceLife
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    GONE,
    AenvError,
    CallCancelled,
    CallOutcomeUnknown,
    ConfigError,
    InstanceReleased,
    PolicyRefused,
    ToolTimeout,
    is_infrastructure,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec
from aenv_ray.runtime.door.async_calls import CALL_ID, TIMEOUT_S, Disconnect
from aenv_ray.runtime.door.host_link import END_PROCESSES_METHOD
from aenv_ray.runtime.door.inner_environments import CALLS, RELEASE

logger = logging.getLogger(__name__)

MAX_DEPTH: Final = 4
"""Maximum depth of nesting, including the outermost instance."""
MAX_INNER: Final = 16
"""Maximum number of live inner instances of one instance."""
MAX_TIMEOUT_S: Final = 86_400.0
_LEAST_TTL_S: Final = 1.0
_LEAST_CALL_S: Final = 0.001
_REMEMBERED: Final = 10_000
_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between attempts to end inner instances; the last one is repeated."""
_QUEUE_SHARE: Final = 0.9
"""Share of a call's timeout for which a new inner instance may wait for room in a full cluster. The
rest is reserved for the answer: the call must end with `CapacityExceeded`, not at its deadline."""


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
        queue_s: float,
    ) -> None:
        """Create an instance for the owner of another one, with its labels and its Ray job.

        Args:
            reference: ``name`` or ``name@version``.
            instance_id: The id of the new instance.
            outer: The instance whose code calls it.
            ttl_s: Seconds until the deadline of the outer instance.
            queue_s: How long it may wait for room in a full cluster.

        Raises:
            EnvironmentNotFound: It does not exist, or the owner may not use it.
            CapacityExceeded: There was no room within `queue_s`.
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
    `END_PROCESSES_METHOD` always applies to all."""
    key: str = Field(max_length=64)
    method: str
    params: dict[str, Any]
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)
    call_id: str = Field(min_length=1, max_length=100)

    @property
    def name(self) -> str:
        """The name of the inner instance within the outer one."""
        return f"{self.environment} {self.key}"


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
        self._creating: dict[InstanceId, asyncio.Task[None]] = {}
        self._released: BoundedCache[InstanceId, bool] = BoundedCache(_REMEMBERED)
        """Inner instances that the code of their outer instance has released."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(
        self, life: InstanceLife, declared: Sequence[str], params: dict[str, Any]
    ) -> bytes:
        """Return the JSON of an inner instance's answer.

        Args:
            life: The outer instance.
            declared: ``deployConfig.environments`` of its project.
            params: As `EnvironmentRequest`.

        Raises:
            ConfigError: The request is malformed, or the project does not declare the environment.
            PolicyRefused: It would exceed a limit of nesting.
            ToolTimeout: The inner instance did not start or answer within the time of the call.
            CallCancelled: The outer instance released the inner one meanwhile.
            AenvError: The inner instance cannot be created, or its call failed.
        """
        try:
            request = EnvironmentRequest.model_validate(params)
        except ValidationError as exc:
            problem = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise ConfigError(
                f"malformed request: {where}: {problem['msg']}",
                hint="call other environments with `Environment`, as docs/environments.md shows",
            ) from None
        if request.method == RELEASE:
            await self._release(life, request)
            return b"{}"
        if request.method == END_PROCESSES_METHOD:
            await self._end_processes(life, request)
            return b"{}"
        if request.method not in CALLS:
            raise ConfigError(
                f"code of an environment cannot call {request.method!r} of another",
                hint=f"it can call: {', '.join(sorted(CALLS))}",
            )
        check_declared(request.environment, declared, life.record.spec.reference)
        check_nesting(request.environment, life.record.spec)
        ends_at = asyncio.get_running_loop().time() + request.timeout_s
        is_first = request.name not in life.record.inner  # its creation has its own deadline
        inner_id = self._inner(life, request)
        try:
            await self._started(inner_id, request, None if is_first else ends_at)
            return await self._called(inner_id, request, ends_at)
        except CallOutcomeUnknown as exc:
            # An agent can keep the inner sandbox from answering. That must not void its episode, so
            # it is not an infrastructure failure.
            raise ToolTimeout(
                f"{request.environment} did not answer {request.method} in time: {exc.message}",
                hint=exc.hint,
            ) from exc
        except AenvError as exc:
            if is_infrastructure(exc) and self._released.get(inner_id):
                # The code of the outer instance released it: that must not void the episode.
                raise CallCancelled(
                    f"{request.environment} was released while it was called",
                    hint="release it after its calls have ended",
                ) from exc
            raise

    async def _end_processes(self, life: InstanceLife, request: EnvironmentRequest) -> None:
        """End the processes of tools in all inner instances; a reward of the outer one begins."""
        ends_at = asyncio.get_running_loop().time() + request.timeout_s

        async def end(inner_id: InstanceId) -> AenvError | None:
            try:
                await self._called(inner_id, request, ends_at)
            except GONE:
                return None  # its processes are gone, too; a call of the reward will raise
            except CallOutcomeUnknown as exc:
                return ToolTimeout(
                    f"{inner_id} did not end the processes of tools: {exc.message}",
                    hint="give the reward a longer timeout",
                )
            except AenvError as exc:
                return exc
            return None

        async with asyncio.TaskGroup() as group:
            running = [one for one in life.record.inner.values() if one not in self._creating]
            tasks = [group.create_task(end(inner_id)) for inner_id in running]
        for failure in filter(None, (task.result() for task in tasks)):
            raise failure

    async def _called(
        self, inner_id: InstanceId, request: EnvironmentRequest, ends_at: float
    ) -> bytes:
        left_s = max(_LEAST_CALL_S, ends_at - asyncio.get_running_loop().time())
        meta = {CALL_ID: request.call_id, TIMEOUT_S: left_s}
        call = JsonCall(inner_id, request.method, request.params, meta)
        calls = (await self._inner_instances()).calls
        # The environment's code chooses the call id. With the instance id as prefix, it cannot
        # collide with a call of another instance.
        name = f"{inner_id}\n{request.call_id}"
        try:
            return await calls.call(call, Disconnect(), name)
        except asyncio.CancelledError:
            # A call with an id continues when its caller is cancelled, so cancel it explicitly.
            self._in_background(calls.cancel(inner_id, name), "cancelling a call")
            raise

    async def _inner_instances(self) -> InnerInstances:
        async with self._connecting:
            if self._connection is None:
                self._connection = await self._connect()
            return self._connection

    def _inner(self, life: InstanceLife, request: EnvironmentRequest) -> InstanceId:
        """Return the inner instance of a name; begin to create it if there is none."""
        known = life.record.inner.get(request.name)
        if known is None:
            if len(life.record.inner) >= MAX_INNER:
                raise PolicyRefused(
                    f"{life.record.id} has {MAX_INNER} inner instances, the most it may have",
                    hint="release those that it no longer needs",
                )
            name, _ = ids.split_reference(request.environment)
            known = ids.new_instance_id(name)
            self._note(life, {**life.record.inner, request.name: known})
            creating = asyncio.create_task(self._create(life, request, known))
            # Retrieve the exception: if all calls are cancelled, nobody awaits this task.
            creating.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._creating[known] = creating
        return known

    async def _started(
        self, inner_id: InstanceId, request: EnvironmentRequest, ends_at: float | None
    ) -> None:
        """Wait until an inner instance is up; another call may have begun to create it."""
        creating = self._creating.get(inner_id)
        if creating is None:
            return
        # Several calls may wait for this task: one that is cancelled must not cancel it.
        waiting = asyncio.timeout_at(ends_at)
        try:
            async with waiting:
                await asyncio.shield(creating)
        except TimeoutError:
            if not waiting.expired():
                raise  # the creating call timed out, not this one
            raise _too_slow(request) from None

    async def _create(
        self, life: InstanceLife, request: EnvironmentRequest, inner_id: InstanceId
    ) -> None:
        record = life.record
        try:
            ttl_s = max(_LEAST_TTL_S, record.deadline - self._clock.now())
            async with asyncio.timeout(request.timeout_s):
                inner = await self._inner_instances()
                queue_s = _QUEUE_SHARE * request.timeout_s
                await inner.create(request.environment, inner_id, record.spec, ttl_s, queue_s)
            logger.info("%s created %s, owner %s", record.id, inner_id, record.spec.owner)
        except BaseException as exc:
            left = {n: i for n, i in life.record.inner.items() if i != inner_id}
            self._note(life, left)
            if isinstance(exc, TimeoutError) and not isinstance(exc, AenvError):
                raise _too_slow(request) from None
            raise
        finally:
            del self._creating[inner_id]
        if life.ended is not None or self._released.get(inner_id):
            self._in_background(self._end_surely(life, [inner_id]), f"ending {inner_id}")
            raise InstanceReleased(f"{inner_id} was released", instance_id=inner_id)
        if life.record.deadline > record.deadline:
            self.renew(life, life.record.deadline - self._clock.now())

    def _note(self, life: InstanceLife, inner: dict[str, InstanceId]) -> None:
        life.record = life.record.model_copy(update={"inner": inner})
        if life.ended is None:
            self._store.put([life.record])

    async def _release(self, life: InstanceLife, request: EnvironmentRequest) -> None:
        inner = life.record.inner
        ending = {n: i for n, i in inner.items() if n == request.name or not request.environment}
        if ending:
            for inner_id in ending.values():
                self._released.put(inner_id, True)
            releasing = asyncio.create_task(self._end_released(life, ending))
            self._tasks.add(releasing)
            releasing.add_done_callback(self._tasks.discard)
            # If the call is cancelled, the record must still be updated.
            await asyncio.shield(releasing)

    async def _end_released(self, life: InstanceLife, ending: dict[str, InstanceId]) -> None:
        try:
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
            inner = list(life.record.inner.values())
            self._in_background(self._renew(inner, ttl_s), f"renewing those of {life.record.id}")

    async def _renew(self, instance_ids: Sequence[InstanceId], ttl_s: float) -> None:
        inner = await self._inner_instances()
        for instance_id in instance_ids:
            try:
                await inner.renew([instance_id], ttl_s)
            except AenvError as exc:  # this one has ended; renew the others
                logger.warning("%s was not renewed: %s", instance_id, exc)

    def end(self, life: InstanceLife) -> None:
        """End the inner instances of an instance that has ended."""
        if life.record.inner:
            inner = list(life.record.inner.values())
            self._in_background(self._end_surely(life, inner), f"ending those of {life.record.id}")

    async def _end_surely(self, life: InstanceLife, instance_ids: Sequence[InstanceId]) -> None:
        """End inner instances; try again until they have reached their deadline."""
        for attempt in itertools.count():
            try:
                await self._end(instance_ids)
            except AenvError as exc:
                if self._clock.now() > life.record.deadline:
                    raise
                pause_s = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                logger.warning("%s: ending %s again in %g s", exc, instance_ids, pause_s)
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
                logger.warning("inner instances: %s: %s", what, exc)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _too_slow(request: EnvironmentRequest) -> ToolTimeout:
    return ToolTimeout(
        f"{request.environment} did not start within the {request.timeout_s:g} s of the call",
        hint="give the call a longer timeout",
    )


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
