"""The JSON of the service routes, in AEnvironment's spelling where it has one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.hub.records import EnvironmentVersion
from aenv_ray.hub.services import MAX_REPLICAS, ServiceRecord
from aenv_ray.project.storage import shown_size
from aenv_ray.serve.gateway.routes.schemas import EnvironmentObject, timestamp
from aenv_ray.serve.services.apps import ServiceState, ServiceStatus
from aenv_ray.serve.services.service import masked

_Replicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]


class _Asked(BaseModel):
    """Unknown fields are ignored, as AEnvironment's server does."""

    model_config = ConfigDict(frozen=True)


class _Resources(_Asked):
    """What the sandboxes of a service have otherwise than the environment says."""

    image: str | None = Field(default=None, max_length=500)
    """Where they are containers."""
    cpu: str | float | None = None
    """Cores: ``"500m"``. A request of AEnvironment's is a limit here, and its limit goes first."""
    cpu_request: str | float | None = None
    cpu_limit: str | float | None = None
    memory: str | None = None
    """``"4Gi"``."""
    memory_request: str | None = None
    memory_limit: str | None = None
    ephemeral_storage: str | None = None
    """Of the work directory, which ends with its sandbox."""
    ephemeral_storage_request: str | None = None
    ephemeral_storage_limit: str | None = None
    port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Of a server inside, reached at ``/services/{name}/ports/{port}/``; 0: none."""
    storage_size: str | None = None
    """``"10Gi"``; it may grow."""
    mount_path: str | None = None
    """Where its code sees the storage."""

    def changes(self) -> dict[str, Any]:
        """Return what is named, as fields of `DeployChanges`; "" is what the environment says."""
        found = {
            "image": self.image,
            "cpu": _first(self.cpu_limit, self.cpu, self.cpu_request),
            "memory": _first(self.memory_limit, self.memory, self.memory_request),
            "ephemeral_storage": _first(
                self.ephemeral_storage_limit, self.ephemeral_storage, self.ephemeral_storage_request
            ),
            "port": self.port,
        }
        return {name: value for name, value in found.items() if value is not None}


class ServiceCreateRequest(_Resources):
    """A new service."""

    env_name: Annotated[str, Field(alias="envName", min_length=1, max_length=200)]
    service_name: str | None = None
    replicas: _Replicas | None = None
    """None: the environment's ``deployConfig.service.replicas``."""
    autoscale: str | None = None
    """``min:max``."""
    environment_variables: dict[str, str] | None = Field(default=None, repr=False)
    engine: str | None = None
    owner: str | None = None
    enable_storage: bool | None = None
    """None: as ``deployConfig.service`` says, or where a size or name of it is given."""
    pvc_name: str | None = None
    """Tells storages of this service apart; those of others it never names."""


class ServiceUpdateRequest(_Resources):
    """What changes; what is not named stays, and "" is what the environment says."""

    replicas: _Replicas | None = None
    autoscale: str | None = None
    """``min:max``; empty: none any more."""
    env_name: Annotated[str | None, Field(alias="envName", max_length=200)] = None
    """Another version of its environment."""
    environment_variables: dict[str, str] | None = Field(default=None, repr=False)
    engine: str | None = None
    """A storage stays what it is: a directory, or a claim of Kubernetes."""
    enable_storage: bool | None = None
    """True gives a storage to one that has none."""


class ServiceFilter(BaseModel):
    """Parameters of the list; none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServiceDeletion(BaseModel):
    """Parameters of a deletion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delete_storage: bool = Field(default=False, alias="deleteStorage")
    """What it kept is deleted once its sandboxes are gone; else its next of this name has it."""


class ServiceLogs(BaseModel):
    """Which part of the logs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tail: int | None = Field(default=None, ge=0)


class ServiceObject(BaseModel):
    """A service as AEnvironment's api-service writes it, and what ours has beyond that."""

    model_config = ConfigDict(frozen=True)

    id: str
    env: dict[str, Any]
    status: ServiceStatus
    created_at: str
    updated_at: str
    replicas: int
    available_replicas: int
    service_url: str
    """Where its MCP and function routes are."""
    owner: str
    environment_variables: dict[str, str]
    """Names; the values are secrets and masked."""
    pvc_name: str
    """Of its storage; empty: it has none."""
    storage_size: str
    mount_path: str
    image: str
    """Like `cpu`, `memory` and `port`: empty where they are the environment's."""
    cpu: str
    memory: str
    ephemeral_storage: str
    port: int | None
    autoscale: str
    """``min:max``, or empty."""
    engine: str
    reason: str
    """Why it is not as it should be."""
    mcp_url: str


def service_object(
    record: ServiceRecord, state: ServiceState, url: str, entry: EnvironmentVersion | None
) -> ServiceObject:
    """Return the object of a service.

    Args:
        record: The hub's.
        state: Serve's.
        url: Where its routes are.
        entry: Its environment, where the hub knows it.
    """
    name, _, version = record.reference.rpartition("/")[2].partition("@")
    entry = entry or EnvironmentVersion(
        name=name, version=version, digest=record.digest, archive="", archive_bytes=0, config={},
        created_at=record.created_at,
    )  # fmt: skip
    scale, storage, changes = record.autoscale, record.storage, record.changes
    return ServiceObject(
        id=record.id,
        env=EnvironmentObject.of(entry).model_dump(exclude={"functions"}),
        status=state.status,
        created_at=timestamp(record.created_at),
        updated_at=timestamp(record.updated_at),
        replicas=state.target_replicas,
        available_replicas=state.available_replicas,
        service_url=url,
        owner=record.owner,
        environment_variables=masked(record),
        pvc_name=storage.name if storage else "",
        storage_size=shown_size(storage.size_bytes) if storage else "",
        mount_path=storage.mount_path if storage else "",
        image=changes.image or "",
        cpu=changes.cpu or "",
        memory=changes.memory or "",
        ephemeral_storage=changes.ephemeral_storage or "",
        port=changes.port,
        autoscale="" if scale is None else f"{scale.min_replicas}:{scale.max_replicas}",
        engine=record.engine or "",
        reason=state.reason,
        mcp_url=f"{url}/mcp",
    )


def _first(*values: str | float | None) -> str | None:
    return next((str(value) for value in values if value is not None), None)
