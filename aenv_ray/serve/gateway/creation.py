"""How instances come to be through the gateway: accounted for, made, told, or undone.

A lease is admitted before anything is made and ends after what it stands for has ended. So what a
dead replica leaves is always in the hub, where the sweep of another finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CREATE_DEADLINE_S
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
)
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId, new_instance_id
from aenv_ray.models import InstanceSpec, InstanceStatus
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.deps import Resolver
from aenv_ray.serve.gateway.idempotency import CreateKeys
from aenv_ray.serve.gateway.instances import Instances, Made
from aenv_ray.serve.gateway.membership import Replicas

logger = logging.getLogger(__name__)

_TRIES: Final = 2
"""A host may have filled up or died since it was looked at."""
_KEY_TRIES: Final = 20
_UNDO_S: Final = 2.0
"""What failed is undone within this time, or behind the answer's back: the hub may be away."""

Phase = Callable[[str, float], None]
"""Told how long a phase of a create took: its name, seconds."""


@dataclass(frozen=True)
class Creation:
    """The instances that a client asks to create."""

    reference: str
    options: CreateOptions
    count: int
    owner: str

    def fingerprint(self) -> str:
        """Return what tells this wish from another under the same key, without its secrets."""
        options = {key: repr(value) for key, value in sorted(vars(self.options).items())}
        text = json.dumps([self.reference, self.count, self.owner, options])
        return hashlib.sha256(text.encode()).hexdigest()


class Creator:
    """Makes instances with leases.

    Args:
        hub: Which accounts for them.
        fabric: Which makes them.
        resolve: Finds projects.
        clock: For deadlines.
        replicas: This process, by whose name its unfinished creates are known, among the others.
        note_phase: Told how long each phase took.
    """

    def __init__(
        self,
        hub: Hub,
        fabric: Instances,
        resolve: Resolver,
        clock: Clock,
        replicas: Replicas,
        note_phase: Phase,
    ) -> None:
        self._hub = hub
        self._fabric = fabric
        self._resolve = resolve
        self._clock = clock
        self._replicas = replicas
        self._note_phase = note_phase
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: set[str] = set()
        self.keys = CreateKeys(hub, clock, replicas)

    @property
    def under_way(self) -> frozenset[str]:
        """Ids of the instances that this process is making."""
        return frozenset(self._under_way)

    async def create(self, wish: Creation, patience_s: float) -> list[Lease]:
        """Make what a wish asks for, all or none; tried again where a host turned out to be full.

        Cancelling it leaves nothing behind.

        Args:
            wish: What to make.
            patience_s: After this long the leases are returned as they are, Pending, and become
                Running or Failed later.

        Raises:
            AenvError: It could not be made; nothing is left.
        """
        for attempt in range(_TRIES):
            source, specs = await self._prepared(wish)
            leases = await self._admitted(wish, specs)
            try:
                return await self._made(wish, source, specs, leases, patience_s)
            except BaseException as exc:
                await self._finish(self.undo([lease.id for lease in leases]))
                is_worth_it = isinstance(exc, CapacityExceeded | FabricUnavailable)
                if not is_worth_it or attempt == _TRIES - 1:
                    raise
        raise AssertionError

    async def undo(self, ids: Sequence[str]) -> None:
        """End instances, and then their leases; what cannot be ended now is left to the sweep."""
        self._under_way.difference_update(ids)
        try:
            await self._fabric.release(ids)
            await self._hub.end_leases(ids)
        except AenvError as exc:
            logger.warning("%d instances are left to the sweep: %s", len(ids), exc)

    async def _finish(self, ending: Coroutine[Any, Any, None]) -> None:
        """Let what was begun be undone to the end, but keep its caller only for a moment."""
        task = asyncio.create_task(ending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=_UNDO_S)

    # --- repeated creates ---------------------------------------------------------------------

    async def create_once(self, wish: Creation, key: str, patience_s: float) -> list[Lease]:
        """Make what a wish asks for, or return what an earlier one with the same key made.

        Args:
            wish: Repeated as it was.
            key: The client's; another owner's equal key is another key.
            patience_s: As in `create`.

        Raises:
            ConfigError: The key came with another wish.
            InstanceReleased: What was made under the key has ended.
            FabricUnavailable: The first is still under way.
            AenvError: It could not be made; the key is free again.
        """
        scope = hashlib.sha256(f"{wish.owner}\0{key}".encode()).hexdigest()
        fingerprint = wish.fingerprint()
        name = wish.reference.partition("@")[0]
        for attempt in range(_KEY_TRIES):
            ids = [new_instance_id(name) for _ in range(wish.count)]
            async with self.keys.claimed(f"{scope}:{attempt}", fingerprint, ids) as claim:
                if claim.ids == ids:
                    return await self._first(wish, ids, patience_s)
            if claim.wish != fingerprint:
                raise ConfigError(
                    "the Idempotency-Key was used for another request",
                    hint="use a new key for each new request, the same only to repeat one",
                )
            leases = await self.keys.made(claim, patience_s)
            if leases is not None:
                return leases
        raise FabricUnavailable(f"{_KEY_TRIES} creates under the Idempotency-Key came to nothing")

    async def _first(self, wish: Creation, ids: list[InstanceId], patience_s: float) -> list[Lease]:
        """Make instances under ids that others may wait for."""
        try:
            source, fresh = await self._prepared(wish)
            specs = [
                spec.model_copy(update={"instance_id": instance_id})
                for spec, instance_id in zip(fresh, ids, strict=True)
            ]
            leases = await self._admitted(wish, specs)
            if not await self.keys.admit(ids[0]):
                raise FabricUnavailable("the create took too long to be admitted")
            return await self._made(wish, source, specs, leases, patience_s, is_keyed=True)
        except BaseException:
            await self._finish(self._give_up(ids))
            raise

    async def _give_up(self, ids: Sequence[str]) -> None:
        try:
            await self.keys.void(ids[0])
        except AenvError as exc:
            # Were the leases to end before that, who repeats the create would be told that what it
            # made has ended.
            logger.warning("a create of %d is left to the sweep: %s", len(ids), exc)
            self._under_way.difference_update(ids)
        else:
            await self.undo(ids)

    # --- making -------------------------------------------------------------------------------

    async def _prepared(self, wish: Creation) -> tuple[Project, list[InstanceSpec]]:
        began = self._clock.now()
        source = await self._resolve(wish.reference)
        specs = wish.options.specs(source, wish.count, job_id=None)
        self._note_phase("resolve", self._clock.now() - began)
        return source, specs

    async def _admitted(self, wish: Creation, specs: Sequence[InstanceSpec]) -> list[Lease]:
        began = self._clock.now()
        leases = [
            Lease(
                id=spec.instance_id,
                reference=spec.reference,
                digest=spec.digest,
                owner=wish.owner,
                labels=spec.labels,
                engine=spec.engine,
                created_at=began,
                # Its time begins when it runs.
                deadline=began + CREATE_DEADLINE_S + spec.ttl_s,
                ttl_s=spec.ttl_s,
                capability=f"i{secrets.token_hex(20)}",
                made_by=self._replicas.name,
            )
            for spec in specs
        ]
        ids = [lease.id for lease in leases]
        self._under_way.update(ids)  # from before the sweep can see them
        try:
            await self._hub.admit(leases)
        except BaseException:
            self._under_way.difference_update(ids)
            raise
        self._note_phase("admit", self._clock.now() - began)
        return leases

    async def _made(
        self,
        wish: Creation,
        source: Project,
        specs: Sequence[InstanceSpec],
        leases: list[Lease],
        patience_s: float,
        *,
        is_keyed: bool = False,
    ) -> list[Lease]:
        """Return leases once their instances run, or as they are when that takes too long."""
        ids = [lease.id for lease in leases]
        task = asyncio.create_task(self._make(wish, source, specs, is_keyed))
        self._tasks.add(task)

        def forget(task: asyncio.Task[list[Lease]]) -> None:
            self._tasks.discard(task)
            self._under_way.difference_update(ids)
            if not task.cancelled() and task.exception() is not None:
                logger.info("create of %s: %s", ids[0], task.exception())

        task.add_done_callback(forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=patience_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result() if done else leases

    async def _make(
        self, wish: Creation, source: Project, specs: Sequence[InstanceSpec], is_keyed: bool
    ) -> list[Lease]:
        began = self._clock.now()
        try:
            made = await self._fabric.create(source, specs, wish.options.actor)
            self._note_phase("start", self._clock.now() - began)
            return await self._note_running(made)
        except AenvError as exc:
            ids = [spec.instance_id for spec in specs]
            with contextlib.suppress(AenvError):  # what stays Pending, the sweep ends
                if is_keyed:
                    await self.keys.void(ids[0])
                for instance_id in ids:
                    await self._hub.update_lease(
                        instance_id, status=InstanceStatus.FAILED, reason=exc.message[:2000]
                    )
                await self._fabric.release(ids)
            raise

    async def _note_running(self, made: Sequence[Made]) -> list[Lease]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._hub.update_lease(
                            one.handle.instance_id,
                            status=InstanceStatus.RUNNING,
                            deadline=one.info.deadline,
                            engine=one.info.engine,
                        )
                    )
                    for one in made
                ]
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Stop making what is under way; the sweep of another replica ends it."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
