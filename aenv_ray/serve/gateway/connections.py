"""Connects a replica's gateway to the hub, the fabric and the artifact store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.types import ASGIApp

from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.publishing import publish
from aenv_ray.config import settings as process_settings
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.hub.client import HubClient
from aenv_ray.serve.gateway.app import GatewayApp
from aenv_ray.serve.gateway.metrics import ExportedMetrics
from aenv_ray.serve.gateway.settings import GatewaySettings


@asynccontextmanager
async def gateway_app(
    settings: GatewaySettings, fabric: Fabric, hub: HubClient, artifacts_url: str | None = None
) -> AsyncIterator[ASGIApp]:
    """Run the gateway of a replica in the event loop that serves it.

    Args:
        settings: The operator's.
        fabric: Of this process.
        hub: Of this process.
        artifacts_url: Of the artifact store; None: as this process's settings say.
    """
    process = process_settings()
    url = artifacts_url or process.artifacts_url
    store = open_artifact_store(process.model_copy(update={"artifacts_url": url}))
    projects_dir = process.data_dir / "projects"
    gateway = GatewayApp(
        hub,
        AsyncFabric(fabric),
        store,
        Catalog(hub, store, process.data_dir),
        partial(publish, hub=hub, store=store, projects_dir=projects_dir),
        settings,
        metrics=ExportedMetrics(),
    )
    try:
        yield await gateway.open()
    finally:
        await gateway.close()
        store.close()
