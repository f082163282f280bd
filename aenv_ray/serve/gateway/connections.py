"""What one replica connects to: the hub, the fabric, the artifact store."""

from __future__ import annotations

from functools import partial

from starlette.types import ASGIApp

from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.publishing import publish
from aenv_ray.config import settings as process_settings
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.hub.client import HubClient
from aenv_ray.serve.gateway.app import Gateway
from aenv_ray.serve.gateway.ray_instances import RayInstances
from aenv_ray.serve.gateway.ray_metrics import RayTwin
from aenv_ray.serve.gateway.settings import GatewaySettings


class ReplicaApp:
    """Makes the gateway of a replica, in the event loop that serves it.

    Args:
        settings: The operator's.
        fabric: This process's connection.
        hub: This process's way to the hub.
        artifacts_url: Where source archives are kept; None: as this process's settings say.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        fabric: Fabric,
        hub: HubClient,
        artifacts_url: str | None = None,
    ) -> None:
        self._settings = settings
        self._fabric = fabric
        self._hub = hub
        own = process_settings()
        url = artifacts_url or own.artifacts_url
        self._store = open_artifact_store(own.model_copy(update={"artifacts_url": url}))
        self._data_dir = own.data_dir
        self._gateway: Gateway | None = None

    async def open(self) -> ASGIApp:
        """Return the application."""
        self._gateway = Gateway(
            self._hub,
            RayInstances(self._fabric),
            self._store,
            Catalog(self._hub, self._store, self._data_dir),
            partial(
                publish,
                hub=self._hub,
                store=self._store,
                projects_dir=self._data_dir / "projects",
            ),
            self._settings,
            twin=RayTwin(),
        )
        return await self._gateway.open()

    async def close(self) -> None:
        """Leave."""
        if self._gateway is not None:
            await self._gateway.close()
        self._store.close()
