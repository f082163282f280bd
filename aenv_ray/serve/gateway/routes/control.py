"""What the handlers of control routes share: the parts of a replica, and instances as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from aenv_ray import ids
from aenv_ray.addresses import is_loopback
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.clock import Clock
from aenv_ray.errors import EnvironmentNotFound, FabricUnavailable, InstanceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import is_digest, missing
from aenv_ray.hub.catalog import unpublished
from aenv_ray.hub.records import (
    EnvironmentVersion,
    Lease,
    NameRecord,
    Page,
    Right,
    TokenRecord,
)
from aenv_ray.models import InstanceStatus
from aenv_ray.project import project
from aenv_ray.serve.gateway.artifact_collection import ArtifactCollector
from aenv_ray.serve.gateway.auth import Principal, RequestRate, invalid_token, principal_of
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.deps import Deps
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.metrics import Metrics
from aenv_ray.serve.gateway.routes.schemas import InstanceObject, instance_object
from aenv_ray.serve.gateway.signing import Signer
from aenv_ray.serve.services.service import Services

ENVIRONMENT_CACHE_S: Final = 10.0
"""How old the status of an environment may be that is shown with an instance."""
TURN_S: Final = 120.0
"""How long an upload or a publish waits for others."""
NAME_CACHE_S: Final = 2.0
"""A revoked grant may work for this long."""
_MAX_ENVIRONMENTS: Final = 1000
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Turns:
    """Limits how many requests do something at once; the others wait for their turn.

    Owners get their turns one after another, however many requests of one owner wait.

    Args:
        count: How many requests may.
        what: Names it in errors.
        of_owner: How many requests of one owner may: fewer than `count`, so that no owner has all.
    """

    def __init__(self, count: int, what: str, *, of_owner: int) -> None:
        self._count = count
        self._what = what
        self._of_owner = of_owner
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """By owner; the first owner's turn is next."""

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it while the block runs.

        Raises:
            FabricUnavailable: None came within `TURN_S`.
        """
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, []).append(mine)
        try:
            self._give()
            try:
                async with asyncio.timeout(TURN_S):
                    await mine
            except TimeoutError:
                raise FabricUnavailable(
                    f"this gateway replica has been busy with {self._count} {self._what}, or with "
                    f"{self._of_owner} of yours, for {TURN_S:g} s",
                    hint="try again later, or have the operator run more replicas",
                ) from None
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self._running -= Counter((owner,))
            else:
                mine.cancel()
            self._give()

    def _give(self) -> None:
        """Give free turns to those who wait, to one owner after another."""
        served = {}
        for owner in list(self._waiting):
            waiting = [turn for turn in self._waiting[owner] if not turn.cancelled()]
            is_free = self._running.total() < self._count
            if waiting and is_free and self._running[owner] < self._of_owner:
                waiting.pop(0).set_result(None)
                self._running[owner] += 1
                del self._waiting[owner]
                served[owner] = waiting
            else:
                self._waiting[owner] = waiting
        self._waiting |= served  # to the end: they are next after all others
        self._waiting = {owner: waiting for owner, waiting in self._waiting.items() if waiting}


class Publish(Protocol):
    """Publishes an untrusted source archive; see `aenv_ray.actors.fabric.publishing.publish`."""

    async def __call__(
        self,
        archive: Path,
        owner: str,
        *,
        is_admin: bool,
        artifact_quota_bytes: int | None,
        allow: Sequence[str] = (),
    ) -> EnvironmentVersion:
        """Return the published version."""
        ...


class EnvironmentCache:
    """Versions by reference and owners of names, which most answers need, cached for seconds."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._hub = hub
        # In a tuple, because None is an answer: the version was never published.
        self._versions: BoundedCache[str, tuple[EnvironmentVersion | None]] = BoundedCache(
            _MAX_ENVIRONMENTS, ttl_s=ENVIRONMENT_CACHE_S, clock=clock
        )
        self._names: BoundedCache[str, NameRecord] = BoundedCache(
            _MAX_ENVIRONMENTS, ttl_s=NAME_CACHE_S, clock=clock
        )

    async def name(self, name: str) -> NameRecord:
        """Return who may use a name, at most `NAME_CACHE_S` old."""
        cached = self._names.get(name)
        if cached is None:
            cached = await self._hub.name(name)
            self._names.put(name, cached)
        return cached

    def forget(self, name: str) -> None:
        """Forget who may use a name, because it has changed."""
        self._names.pop(name)

    async def find(self, reference: str) -> EnvironmentVersion | None:
        """Return a version, at most `ENVIRONMENT_CACHE_S` old; None: it was never published.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        cached = self._versions.get(reference)
        if cached is None:
            cached = (await self._published(reference),)
            self._versions.put(reference, cached)
        return cached[0]

    async def _published(self, reference: str) -> EnvironmentVersion | None:
        if project.looks_like_path(reference):
            return None  # of a service that Python code has deployed
        name, _, version = reference.partition("@")
        try:
            return await self._hub.environment(name, version)
        except EnvironmentNotFound:
            return None


@dataclass(frozen=True)
class Control:
    """The control side of one replica."""

    deps: Deps
    creator: Creator
    services: Services
    environments: EnvironmentCache
    rate: RequestRate
    publish: Publish
    metrics: Metrics
    collector: ArtifactCollector
    uploads: Turns
    publishes: Turns
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def signer(self) -> Signer:
        """Signs URLs and addresses."""
        return self.deps.signer

    def keep_running(self, task: asyncio.Task[Any]) -> None:
        """Let a task finish even if nobody waits for it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def refreshed(self, lease: Lease) -> Lease:
        """Return a lease with the status and deadline that the instance's host reports now."""
        if lease.status is not InstanceStatus.RUNNING:
            return lease
        try:
            info = await self.deps.fabric.info(lease.id)
        except InstanceNotFound:
            return lease.model_copy(update={"status": InstanceStatus.TERMINATED})
        except FabricUnavailable:
            return lease  # the hub's word is the latest known
        reason = "its sandbox, its host or its node died"
        return lease.model_copy(
            update={
                "status": info.status,
                "deadline": info.deadline,
                "reason": reason if info.status is InstanceStatus.FAILED else lease.reason,
            }
        )


@dataclass(frozen=True)
class RouteCall:
    """A request to a control route, as its handler receives it."""

    control: Control
    request: Request

    @property
    def caller(self) -> Principal:
        """The sender; public routes have none."""
        return principal_of(self.request)

    async def token(self) -> TokenRecord:
        """Return the caller's token.

        Raises:
            Unauthorized: It was revoked a moment ago.
        """
        record = await self.hub.token(self.caller.token_id)
        if record is None:
            raise invalid_token()
        return record

    @property
    def hub(self) -> Hub:
        """The hub."""
        return self.control.deps.hub

    def note(self, **detail: str) -> None:
        """Add to the request's record in the audit log; ``subject`` is what it is about.

        ``outcome`` says why an answer that is no error did nothing.
        """
        self.request.scope["aenv.audit"].update(detail)

    @property
    def visible_to(self) -> str | None:
        """The owner whose environments the caller sees; None: those of all owners."""
        return None if self.caller.is_admin else self.caller.owner

    async def may_use(self, name: str) -> bool:
        """Whether the caller may see and use the published environments of a name."""
        owner = self.visible_to
        return owner is None or (await self.control.environments.name(name)).may(owner, Right.USE)

    async def check_use(self, reference: str) -> None:
        """Check that the caller may use an environment (invariant 15).

        Args:
            reference: ``name`` or ``name@version``; one that is built in is for everybody.

        Raises:
            EnvironmentNotFound: It belongs to another owner, who has not granted its use.
        """
        name, _ = ids.split_reference(reference)
        if await self.may_use(name):
            return
        if name in project.builtins():
            await asyncio.to_thread(project.resolve, reference)
            return
        raise unpublished(name)

    async def check_archive(self, digest: str) -> None:
        """Check that the caller may read an artifact: their own, or one of a visible environment.

        Raises:
            ArtifactNotFound: The caller may not.
        """
        owner = self.visible_to
        if owner is None:
            return
        if is_digest(digest):
            if await self.hub.has_artifact(owner, digest):
                return
            for reference in await self.hub.versions_of_archive(digest):
                if await self.may_use(reference.partition("@")[0]):
                    return
        raise missing(self.control.deps.artifacts.name, digest)

    async def owned(self, instance_id: str) -> Lease:
        """Return the lease of an instance that the caller may use.

        Raises:
            InstanceNotFound: It does not exist, or belongs to another owner.
            Forbidden: The caller is an agent.
        """
        lease = await self.hub.lease(instance_id)
        self.caller.check_owns(lease)
        return lease

    async def live(self, instance_id: str) -> AsyncEnvHandle:
        """Return an instance that the caller may use, to call it.

        Raises:
            AenvError: As `owned` and `AsyncFabric.handle`.
        """
        await self.owned(instance_id)
        return AsyncEnvHandle(await self.control.deps.fabric.handle(instance_id))

    async def shown(self, lease: Lease) -> InstanceObject:
        """Return an instance as only its owner may see it."""
        entry = await self.control.environments.find(lease.reference)
        url = self.mcp_url(lease.id)
        address = await self.control.signer.address(lease.capability, self.caller.token_id)
        return instance_object(lease, mcp_url=url, entry=entry, address=address)

    async def listed(self, lease: Lease) -> InstanceObject:
        """Return an instance as lists show it: without its address and configuration."""
        entry = await self.control.environments.find(lease.reference)
        if entry is not None:
            entry = entry.model_copy(update={"config": {}, "artifacts": ()})
        url = self.mcp_url(lease.id)
        return instance_object(lease, mcp_url=url, entry=entry, address="")

    def mcp_url(self, instance_id: str) -> str:
        """Return the MCP endpoint of an instance."""
        return f"{self._data_url()}/instances/{instance_id}/mcp"

    def service_url(self, service_id: str) -> str:
        """Return the base URL of a service's MCP endpoint and functions."""
        return f"{self._data_url()}/services/{service_id}"

    def _data_url(self) -> str:
        settings = self.control.deps.settings
        base = settings.public_mcp_url
        if base is None:
            url = self.request.url
            is_control = (url.port or _DEFAULT_PORTS.get(url.scheme)) == settings.port
            base = self._own_url(settings.mcp_port if is_control else url.port)
        return base.rstrip("/")

    def control_url(self) -> str:
        """Return the base URL of the control routes."""
        base = self.control.deps.settings.public_url or self._own_url(self.request.url.port)
        return base.rstrip("/")

    def _own_url(self, port: int | None) -> str:
        """Return the URL by which the client reached the gateway, if that can be true.

        A gateway that listens on a loopback address is reached by no other name.
        """
        host, own = self.request.url.hostname or "", self.control.deps.settings.host
        if not _HOST_NAME.fullmatch(host) or (is_loopback(own) and not is_loopback(host)):
            host = own
        shown = f"[{host}]" if ":" in host else host
        return f"{self.request.url.scheme}://{shown}" + (f":{port}" if port else "")


def page_answer(page: Page[Any], items: Sequence[BaseModel]) -> Response:
    """Return one page of a list, with the total and the next cursor in headers."""
    headers = {"X-Total-Count": str(page.total)}
    if page.cursor is not None:
        headers["X-Next-Cursor"] = page.cursor
    return success(items, headers=headers)
