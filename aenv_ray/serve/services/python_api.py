"""Services from Python: in a process that joined the cluster, or starts a local one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aenv_ray.actors.fabric import entrance, references
from aenv_ray.clock import SystemClock
from aenv_ray.hub.client import blocking
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.services import Autoscale, ServiceRecord
from aenv_ray.project.project import Project
from aenv_ray.serve.services.apps import ServeApps, ServiceState, app_name
from aenv_ray.serve.services.service import Services
from aenv_ray.serve.services.storage import RaySites, StorageWish


def deploy(  # noqa: PLR0913  # each is an option
    environment: str | Path,
    *,
    name: str | None = None,
    replicas: int = 1,
    autoscale: tuple[int, int] | None = None,
    environment_variables: Mapping[str, str] | None = None,
    engine: str | None = None,
    image: str | None = None,
    cpu: str | float | None = None,
    memory: str | None = None,
    port: int | None = None,
    enable_storage: bool | None = None,
    storage_size: str | None = None,
    mount_path: str | None = None,
    healthy_within_s: float = 120.0,
    owner: str = "",
    wait: bool = True,
) -> Any:
    """Make a service of an environment, or bring the one of that name up to what is said here.

    Joins or starts Ray first where needed.

    Args:
        environment: ``name@version`` or ``name``, or a project's path where all of Ray runs on
            one machine.
        name: Of the service; None: a new one with a name made up.
        replicas: How many sandboxes; 0 parks it.
        autoscale: Least and most replicas; Serve chooses by load. None: `replicas`.
        environment_variables: Added to the project's, and to those the service has.
        engine: None: as for an instance.
        image: Of its containers. None: the environment's.
        cpu: Cores of a sandbox: ``2``, ``"500m"``. None: as the environment says.
        memory: Of a sandbox: ``"4Gi"``. None: as the environment says.
        port: Of a server inside, which ``/services/{name}/ports/{port}/`` of the gateway reaches.
        enable_storage: Whether it keeps a directory beyond its sandboxes. None: as the environment
            says, or as the service has it.
        storage_size: ``"10Gi"``; it may grow. None: as the environment says, or as it is.
        mount_path: Where its code sees that directory. None: as the environment says, or as it is.
        healthy_within_s: How long its health function may take to say that it is healthy.
        owner: Whose it is; empty: nobody's but administrators'.
        wait: Return once all replicas are healthy.

    Returns:
        Ray Serve's handle of it: ``handle.call_tool.remote("echo", {"text": "hi"}).result()``;
        None of one that is parked.

    Raises:
        EnvironmentNotFound: There is no such environment.
        ConfigError: An option cannot be.
        CatalogConflict: The storage that it had is being deleted.
        FabricUnavailable: It does not become healthy; `aenv service get` says why.
    """
    entrance.init()
    options: dict[str, Any] = {
        "replicas": replicas,
        "autoscale": None
        if autoscale is None
        else Autoscale.parse(f"{autoscale[0]}:{autoscale[1]}"),
        "environment_variables": dict(environment_variables or {}),
        "engine": engine,
        "healthy_within_s": healthy_within_s,
        "changes": {
            "image": image or "",
            "cpu": "" if cpu is None else str(cpu),
            "memory": memory or "",
            "port": port or "",
        },
        "storage": StorageWish(is_wanted=enable_storage, size=storage_size, mount_path=mount_path),
    }
    services = _services()
    reference = str(environment)

    async def bring() -> ServiceRecord:
        known = (await services.records.all()).get(name) if name is not None else None
        if known is None:
            return await services.create(reference, owner, name=name, wait=wait, **options)
        return await services.update(known, wait=wait, reference=reference, **options)

    record = blocking(bring())
    if record.replicas == 0:
        return None
    from ray import serve

    return serve.get_app_handle(app_name(record.id))


def remove(name: str, *, delete_storage: bool = False) -> None:
    """End a service, its sandboxes too; waits for calls under way.

    Args:
        name: Which.
        delete_storage: Delete what it kept, too; else a service of this name and owner finds it.

    Raises:
        ServiceNotFound: There is none of this name.
        FabricUnavailable: The service ended, and its storage could not be deleted yet.
    """
    entrance.init()
    services = _services()

    async def end() -> None:
        record = await services.records.get(name)
        await services.delete(record, wait=True, delete_storage=delete_storage)

    blocking(end())


def state(name: str) -> ServiceState:
    """Return how a service is.

    Raises:
        ServiceNotFound: There is none of this name.
    """
    entrance.init()
    services = _services()

    async def look() -> ServiceState:
        return (await services.states([await services.records.get(name)]))[0]

    return blocking(look())


def _services() -> Services:
    async def resolve(reference: str) -> Project:
        return await asyncio.to_thread(references.resolve, reference, entrance.init)

    return Services(ensure_hub(), resolve, SystemClock(), ServeApps(), RaySites())
