"""Creates instances for clients: admits them to the hub, starts them, and undoes what fails.

A lease exists before its instance does, and ends after it. So whatever a dead replica leaves behind
is in the hub, where another replica's sweep finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.actors.fabric.async_fabric import GATEWAY_QUEUE_S, AsyncFabric, CreatedInstance
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CREATE_DEADLINE_S
from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import Lease
from aenv_ray.ids import instance_ids
from aenv_ray.models import InstanceSpec, InstanceStatus
from aenv_ray.policy import Policy
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.deps import Resolver
from aenv_ray.serve.gateway.idempotency import Claim, IdempotencyKeys
from aenv_ray.serve.gateway.membership import Membership

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 2
"""A host may have died since its state was read. The create protocol moves no instance of ours to
another host, because a lease is for one id; it waits for room in full ones."""
_KEY_ATTEMPTS: Final = 20
_UNDO_S: Final = 2.0
"""How long the response to a failed create waits for its cleanup, which continues afterwards."""

NotePhase = Callable[[str, float], None]
"""Called with the name of a phase of a create, and its duration in seconds."""


@dataclass(frozen=True)
class Creation:
    """The instances that a client asks to create."""

    reference: str
    options: CreateOptions
    count: int
    owner: str
    queue_s: float = GATEWAY_QUEUE_S
    """Longest wait for room in a full cluster."""

    def fingerprint(self) -> str:
        """Return a hash that differs for a different request; it reveals no secret."""
        options = {key: repr(value) for key, value in sorted(vars(self.options).items())}
        text = json.dumps([self.reference, self.count, self.owner, options])
        return hashlib.sha256(text.encode()).hexdigest()


class Creator:
    """Creates instances with leases."""

    def __init__(
        self,
        hub: Hub,
        fabric: AsyncFabric,
        resolve: Resolver,
        clock: Clock,
        membership: Membership,
        note_phase: NotePhase,
        policy: Callable[[], Policy] = Policy,
    ) -> None:
        self._policy = policy
        self._hub = hub
        self._fabric = fabric
        self._resolve = resolve
        self._clock = clock
        self._membership = membership
        self._note_phase = note_phase
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_progress: set[str] = set()
        self.keys = IdempotencyKeys(hub, clock, membership)

    @property
    def in_progress(self) -> frozenset[str]:
        """Ids of the instances that this process is creating."""
        return frozenset(self._in_progress)

    async def create(self, creation: Creation, wait_s: float) -> list[Lease]:
        """Create instances, all or none; try again if a host turned out to be dead.

        A cancelled create leaves nothing behind.

        Args:
            creation: What to create.
            wait_s: After this time the leases are returned Pending; they become Running or Failed
                later.

        Raises:
            AenvError: The create failed, and nothing is left.
        """
        ends = self._clock.now() + creation.queue_s
        for attempt in range(_ATTEMPTS):
            source, specs = await self._prepare(creation)
            leases = await self._admit(creation, specs)
            try:
                return await self._start(creation, source, specs, leases, wait_s)
            except BaseException as exc:
                await self._finish(self.undo([lease.id for lease in leases]))
                left_s = ends - self._clock.now()
                is_retryable = isinstance(exc, FabricUnavailable) and left_s > 0
                if not is_retryable or attempt == _ATTEMPTS - 1:
                    raise
                creation = replace(creation, queue_s=left_s)
        raise AssertionError

    async def undo(self, ids: Sequence[str]) -> None:
        """End instances, and then their leases; the sweep ends what cannot be ended now."""
        self._in_progress.difference_update(ids)
        try:
            await self._fabric.release(ids)
            await self._hub.end_leases(ids)
        except AenvError as exc:
            logger.warning("cannot end %d instances, the sweep will: %s", len(ids), exc)

    async def _finish(self, undoing: Coroutine[Any, Any, None]) -> None:
        """Undo a create to the end, but make the caller wait for at most `_UNDO_S`."""
        task = asyncio.create_task(undoing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=_UNDO_S)

    # --- idempotent creates -------------------------------------------------------------------

    async def create_once(self, creation: Creation, key: str, wait_s: float) -> list[Lease]:
        """Create instances, or return those of an earlier create with the same key.

        Raises:
            ConfigError: The key was used for another create.
            CapacityExceeded: The key is new, and the owner has used too many.
            InstanceReleased: The instances of the earlier create have ended.
            FabricUnavailable: The earlier create is still in progress.
            AenvError: The create failed; the key is free again.
        """
        scope = hashlib.sha256(f"{creation.owner}\0{key}".encode()).hexdigest()
        fingerprint = creation.fingerprint()
        name = creation.reference.partition("@")[0]
        failed: Claim | None = None
        for _ in range(_KEY_ATTEMPTS):
            seed = secrets.token_hex(16)
            ids = instance_ids(name, seed, creation.count)
            # ":0" since earlier versions of aenv-ray number the claims of a key.
            async with self.keys.claim(
                f"{scope}:0", creation.owner, fingerprint, ids, seed, failed
            ) as claim:
                if claim.ids == ids:
                    return await self._create_claimed(creation, claim, wait_s)
            if claim.fingerprint != fingerprint:
                raise ConfigError(
                    "the Idempotency-Key was used for another request",
                    hint="use the same key only to repeat a request, and a new key for a new one",
                )
            leases = await self.keys.wait(claim, wait_s)
            if leases is not None:
                return leases
            failed = claim
        raise FabricUnavailable(
            f"{_KEY_ATTEMPTS} other creates with this Idempotency-Key failed meanwhile",
            hint="use a new key",
        )

    async def _create_claimed(self, creation: Creation, claim: Claim, wait_s: float) -> list[Lease]:
        """Create instances under the ids of a claim, for which other requests may wait."""
        ids = claim.ids
        try:
            source, fresh = await self._prepare(creation)
            specs = [
                spec.model_copy(update={"instance_id": instance_id})
                for spec, instance_id in zip(fresh, ids, strict=True)
            ]
            leases = await self._admit(creation, specs)
            if not await self.keys.mark_admitted(ids[0]):
                raise FabricUnavailable(
                    "the create took so long to be admitted that a repeated request replaced it",
                    hint="repeat the request with the same key",
                )
            return await self._start(creation, source, specs, leases, wait_s, claim=claim)
        except BaseException:
            await self._finish(self._fail_claim(claim))
            raise

    async def _fail_claim(self, claim: Claim) -> None:
        ids = claim.ids
        try:
            await self.keys.mark_failed(ids[0], claim)
        except AenvError as exc:
            # The leases stay: if they ended first, a repeated request would be told that the
            # instances have ended.
            logger.warning(
                "cannot undo a create of %d instances, the sweep will: %s", len(ids), exc
            )
            self._in_progress.difference_update(ids)
        else:
            await self.undo(ids)

    # --- phases -------------------------------------------------------------------------------

    async def _prepare(self, creation: Creation) -> tuple[Project, list[InstanceSpec]]:
        began = self._clock.now()
        source = await self._resolve(creation.reference)
        policy = self._policy()
        specs = creation.options.specs(source, creation.count, job_id=None, policy=policy)
        policy.check(source.config, specs[0].engine)
        policy.check_ttl(specs[0].ttl_s, specs[0].reference)
        self._note_phase("resolve", self._clock.now() - began)
        return source, specs

    async def _admit(self, creation: Creation, specs: Sequence[InstanceSpec]) -> list[Lease]:
        began = self._clock.now()
        leases = [
            Lease(
                id=spec.instance_id,
                reference=spec.reference,
                digest=spec.digest,
                owner=creation.owner,
                labels=spec.labels,
                engine=spec.engine,
                created_at=began,
                # The TTL starts when the instance runs.
                deadline=began + CREATE_DEADLINE_S + spec.ttl_s,
                ttl_s=spec.ttl_s,
                capability=f"n{secrets.token_hex(20)}",
                made_by=self._membership.name,
                places=spec.places,
            )
            for spec in specs
        ]
        ids = [lease.id for lease in leases]
        self._in_progress.update(ids)  # before the sweep can see the leases
        try:
            await self._hub.admit(leases)
        except BaseException:
            self._in_progress.difference_update(ids)
            raise
        self._note_phase("admit", self._clock.now() - began)
        return leases

    async def _start(
        self,
        creation: Creation,
        source: Project,
        specs: Sequence[InstanceSpec],
        leases: list[Lease],
        wait_s: float,
        *,
        claim: Claim | None = None,
    ) -> list[Lease]:
        """Return the leases once the instances run, or Pending after `wait_s`."""
        ids = [lease.id for lease in leases]
        task = asyncio.create_task(self._start_to_end(creation, source, specs, claim))
        self._tasks.add(task)

        def forget(task: asyncio.Task[list[Lease]]) -> None:
            self._tasks.discard(task)
            self._in_progress.difference_update(ids)
            if not task.cancelled() and task.exception() is not None:
                extra = logs.of_instance(ids[0], creation.owner)
                logger.info("create of %s failed: %s", ids[0], task.exception(), extra=extra)

        task.add_done_callback(forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=wait_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result() if done else leases

    async def _start_to_end(
        self,
        creation: Creation,
        source: Project,
        specs: Sequence[InstanceSpec],
        claim: Claim | None,
    ) -> list[Lease]:
        """Start instances and note that they run, or that they failed."""
        began = self._clock.now()
        try:
            made = await self._fabric.create(
                source, specs, creation.options.actor, queue_s=creation.queue_s
            )
            self._note_phase("start", self._clock.now() - began)
            return await self._note_running(made)
        except AenvError as exc:
            ids = [spec.instance_id for spec in specs]
            with contextlib.suppress(AenvError):  # the sweep ends leases that stay Pending
                if claim is not None:
                    await self.keys.mark_failed(ids[0], claim)
                for instance_id in ids:
                    await self._hub.update_lease(
                        instance_id, status=InstanceStatus.FAILED, reason=exc.message[:2000]
                    )
            # Also without a lease: it may have been released while it started.
            with contextlib.suppress(AenvError):
                await self._fabric.release(ids)
            raise

    async def _note_running(self, made: Sequence[CreatedInstance]) -> list[Lease]:
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
        """Cancel the creates in progress; another replica's sweep ends what they started."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
