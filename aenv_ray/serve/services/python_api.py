"""The Python API of services: deploy, remove, state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aenv_ray.actors.fabric import driver_api, references
from aenv_ray.actors.ray_shell import operator_policy, ray_serve
from aenv_ray.clock import SystemClock
from aenv_ray.hub.client import blocking
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.services import Autoscale, ServiceRecord
from aenv_ray.project.project import Project
from aenv_ray.serve.services.apps import ServeApps, ServiceState, app_name
from aenv_ray.serve.services.service import Services
from aenv_ray.serve.services.storage import StorageRequest, delete_data


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
    """Create a service of an environment, or update the service of that name.

    Joins or starts Ray first if needed.

    Args:
        environment: ``name@version`` or ``name``; or the path of a project, if Ray runs on this
            machine only.
        name: Name of the service. None makes up a new one.
        replicas: Number of sandboxes; 0 pauses the service.
        autoscale: Minimum and maximum number of replicas; Serve chooses by load. None means
            `replicas`.
        environment_variables: Added to those of the project and of the service.
        engine: As for `aenv_ray.create`.
        image: Image of its containers. None means the environment's.
        cpu: Cores per sandbox: ``2``, ``"500m"``. None means the environment's.
        memory: Memory per sandbox: ``"4Gi"``. None means the environment's.
        port: Port of a server inside, served at ``/services/{name}/ports/{port}/`` of the gateway.
        enable_storage: Give the service a directory that outlives its sandboxes. None means the
            service's, or the environment's setting.
        storage_size: ``"10Gi"``; a size can only grow. None means the service's, or the
            environment's.
        mount_path: Path of that directory in the sandbox. None means the service's, or the
            environment's.
        healthy_within_s: Seconds that a sandbox may take to become healthy.
        owner: Owner of the service. "" leaves it to administrators.
        wait: Return once all replicas are healthy.

    Returns:
        Ray Serve's ``DeploymentHandle`` of the service, for calls such as
        ``handle.call_tool.remote("echo", {"text": "hi"}).result()``. None if it is paused.

    Raises:
        EnvironmentNotFound: The environment does not exist.
        ConfigError: An option is invalid.
        CatalogConflict: The storage of an earlier service of this name is being deleted.
        FabricUnavailable: No node can run its sandboxes, or the service does not become healthy;
            `aenv service get` says why.
    """
    driver_api.init()
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
        "storage": StorageRequest(
            is_wanted=enable_storage, size=storage_size, mount_path=mount_path
        ),
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
    return ray_serve.app_handle(app_name(record.id))


def remove(name: str, *, delete_storage: bool = False) -> None:
    """End a service and its sandboxes, once the running calls have ended.

    Args:
        name: Name of the service.
        delete_storage: Delete its storage too. Otherwise a new service with this name and owner
            gets the same storage.

    Raises:
        ServiceNotFound: The service does not exist.
        FabricUnavailable: The service ended, but its storage could not be deleted yet.
    """
    driver_api.init()
    services = _services()

    async def end() -> None:
        record = await services.records.get(name)
        await services.delete(record, wait=True, delete_storage=delete_storage)

    blocking(end())


def state(name: str) -> ServiceState:
    """Return the state of a service.

    Raises:
        ServiceNotFound: The service does not exist.
    """
    driver_api.init()
    services = _services()

    async def look() -> ServiceState:
        return (await services.states([await services.records.get(name)]))[0]

    return blocking(look())


def _services() -> Services:
    async def resolve(reference: str) -> Project:
        return await asyncio.to_thread(references.resolve_environment, reference, driver_api.init)

    async def check_engines(engines: Sequence[str]) -> None:
        await asyncio.to_thread(lambda: driver_api.init().shared_hosts(0, engines))

    clock, policy = SystemClock(), operator_policy.current
    return Services(ensure_hub(), resolve, clock, ServeApps(), delete_data, check_engines, policy)
