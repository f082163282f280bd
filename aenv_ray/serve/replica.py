"""What one replica connects to: the hub, the fabric, the artifact store."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.types import ASGIApp

from aenv_ray import ids, project
from aenv_ray.actors.fabric import Fabric
from aenv_ray.actors.publishing import publish
from aenv_ray.actors.remote_hub import RemoteHub
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import ConfigError
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.project import Project
from aenv_ray.serve.app import Gateway
from aenv_ray.serve.ray_instances import RayInstances
from aenv_ray.serve.ray_metrics import RayTwin
from aenv_ray.serve.settings import GatewaySettings


class ReplicaApp:
    """Makes the gateway of a replica, in the event loop that serves it.

    Args:
        settings: The operator's.
        fabric: This process's connection.
        hub: This process's way to the hub.
    """

    def __init__(self, settings: GatewaySettings, fabric: Fabric, hub: RemoteHub) -> None:
        self._settings = settings
        self._fabric = fabric
        self._hub = hub
        self._store = open_artifact_store(process_settings())
        self._projects = process_settings().data_dir / "projects"
        self._gateway: Gateway | None = None

    async def open(self) -> ASGIApp:
        """Return the application."""
        self._gateway = Gateway(
            self._hub,
            RayInstances(self._fabric),
            self._store,
            self._resolve,
            partial(publish, hub=self._hub, store=self._store, projects_dir=self._projects),
            self._settings,
            twin=RayTwin(),
        )
        return await self._gateway.open()

    async def _resolve(self, reference: str) -> Project:
        name, version = ids.split_reference(reference)
        if name in project.builtins():
            return await asyncio.to_thread(project.resolve, reference)
        entry = await self._hub.environment(name, version)
        if not entry.archive:
            raise ConfigError(f"{entry.reference} was published without its source")
        archive = await self._store.read(entry.archive)
        path = await asyncio.to_thread(project.unpack, archive, entry.digest, self._projects)
        return await asyncio.to_thread(project.load, path)

    async def close(self) -> None:
        """Leave."""
        if self._gateway is not None:
            await self._gateway.close()
        self._store.close()
