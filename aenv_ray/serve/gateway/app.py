"""The gateway of one replica, composed of its parts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.routing import Router
from starlette.types import ASGIApp

from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.publishing import publish
from aenv_ray.actors.ray_shell import operator_policy
from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import AenvError
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore, open_artifact_store
from aenv_ray.hub.records import EnvironmentVersion, Lease
from aenv_ray.policy import Policy
from aenv_ray.serve.gateway.artifact_collection import ArtifactCollector
from aenv_ray.serve.gateway.auth import HubAuthenticator, RequestRate
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.data.routes import data_routes
from aenv_ray.serve.gateway.data.services import service_routes
from aenv_ray.serve.gateway.deps import Deps, Resolver
from aenv_ray.serve.gateway.membership import Membership
from aenv_ray.serve.gateway.metrics import ExportedMetrics, Metrics
from aenv_ray.serve.gateway.middleware import AccessLog, GatewayMiddleware
from aenv_ray.serve.gateway.routes.control import Control, EnvironmentCache, Publish, Turns
from aenv_ray.serve.gateway.routes.control_api import ControlApi
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.gateway.signing import Signer
from aenv_ray.serve.gateway.sweep import Sweep
from aenv_ray.serve.services.apps import Apps, ServeApps
from aenv_ray.serve.services.service import Services
from aenv_ray.serve.services.storage import DeleteData, delete_data
from aenv_ray.units import parse_memory_bytes

logger = logging.getLogger(__name__)

_UPLOADS: Final = 16
_UPLOADS_OF_OWNER: Final = 4
_PUBLISHES: Final = 2
"""A publish holds a whole archive in memory, and may take minutes; one of an owner at a time."""


class GatewayApp:
    """One replica of the gateway: `app` serves both ports."""

    def __init__(
        self,
        hub: Hub,
        fabric: AsyncFabric,
        artifacts: ArtifactStore,
        resolve: Resolver,
        publish: Publish,
        settings: GatewaySettings,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        apps: Apps | None = None,
        delete_storage: DeleteData = delete_data,
        policy: Callable[[], Policy] = Policy,
        artifact_quota_bytes: int | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.replica = f"gateway-{secrets.token_hex(6)}"
        self.metrics = metrics or Metrics()
        tokens = HubAuthenticator(hub, clock, settings.token_cache_s)
        calls = InstanceCalls(fabric.handle, fabric.forget)
        self.deps = Deps(
            hub, fabric, calls, artifacts, resolve, tokens, settings, clock, policy,
            artifact_quota_bytes, Signer(hub, clock),
        )  # fmt: skip
        self.membership = Membership(hub, clock, self.replica, settings.sweep_s)
        self.creator = Creator(
            hub, fabric, resolve, clock, self.membership, self.metrics.create_phase, policy
        )
        self.services = Services(
            hub, resolve, clock, apps or ServeApps(), delete_storage, fabric.check_engines, policy
        )
        self.collector = ArtifactCollector(hub, artifacts, clock)
        self.sweep = Sweep(
            hub,
            fabric,
            self.creator,
            self.membership,
            settings.sweep_s,
            self._note_live,
            self.metrics.pools,
        )
        self.control_api = ControlApi(
            Control(
                self.deps,
                self.creator,
                self.services,
                EnvironmentCache(hub, clock),
                RequestRate(settings.requests_per_s, settings.burst, clock),
                publish,
                self.metrics,
                self.collector,
                Turns(_UPLOADS, "uploads", of_owner=_UPLOADS_OF_OWNER),
                Turns(_PUBLISHES, "publishes", of_owner=1),
            )
        )
        self.access_log = AccessLog(self.metrics)
        self.data_routes = [*data_routes(self.deps), *service_routes(self.services, self.deps)]
        # The data routes come first: a request whose headers name an instance is for it, whatever
        # its path is.
        routes = Router(routes=self.data_routes, default=self.control_api, redirect_slashes=False)
        self.app: ASGIApp = GatewayMiddleware(
            routes, self.access_log, settings.max_ongoing_requests, settings.max_bodies_bytes
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> ASGIApp:
        """Start the background tasks, and return the application."""
        self._tasks = [
            asyncio.create_task(self.sweep.run()),
            asyncio.create_task(self.collector.run(self.membership)),
            asyncio.create_task(self._restore_services()),
        ]
        return self.app

    async def close(self) -> None:
        """End the background tasks, and undo the creates in progress."""
        for task in self._tasks:
            await end_task(task)
        await self.services.close()
        await self.creator.close()
        self.deps.calls.close()
        self.access_log.flush()

    async def _restore_services(self) -> None:
        try:
            await self.services.restore()
        except AenvError as exc:  # another replica, or the next start, does it
            logger.warning("services were not restored: %s", exc.message)

    def _note_live(self, leases: Collection[Lease]) -> None:
        self.metrics.flush()
        self.metrics.live(leases)


@asynccontextmanager
async def gateway_app(
    settings: GatewaySettings, fabric: Fabric, hub: Hub, artifacts_url: str | None = None
) -> AsyncIterator[ASGIApp]:
    """Run the gateway of a replica in the event loop that serves it."""
    process = process_settings()
    url = artifacts_url or process.artifacts_url
    store = open_artifact_store(process.model_copy(update={"artifacts_url": url}))
    projects_dir = process.data_dir / "projects"

    async def publish_under_policy(
        archive: Path,
        owner: str,
        *,
        is_admin: bool,
        artifact_quota_bytes: int | None,
        allow: Sequence[str] = (),
    ) -> EnvironmentVersion:
        policy = operator_policy.current()
        return await publish(
            archive, owner, hub=hub, store=store, projects_dir=projects_dir, policy=policy,
            artifact_quota_bytes=artifact_quota_bytes, is_admin=is_admin, allow=allow,
        )  # fmt: skip

    gateway = GatewayApp(
        hub,
        AsyncFabric(fabric),
        store,
        Catalog(hub, store, process.data_dir),
        publish_under_policy,
        settings,
        metrics=ExportedMetrics(),
        policy=operator_policy.current,
        artifact_quota_bytes=parse_memory_bytes(process.artifact_quota, what="AENV_ARTIFACT_QUOTA"),
    )
    try:
        yield await gateway.open()
    finally:
        await gateway.close()
        store.close()
