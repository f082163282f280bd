"""The JSON of the service routes; fields that AEnvironment has keep its spelling."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.hub.records import EnvironmentVersion
from aenv_ray.hub.services import MAX_REPLICAS, ServiceRecord
from aenv_ray.project.storage import shown_size
from aenv_ray.serve.gateway.routes.schemas import NoQuery, RequestBody, shown_environment, timestamp
from aenv_ray.serve.services.apps import ServiceState, ServiceStatus
from aenv_ray.serve.services.service import masked_variables

_Replicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]


class _Resources(RequestBody):
    """What a service overrides of its environment."""

    image: str | None = Field(default=None, max_length=500)
    """The image of sandboxes that are containers or pods."""
    cpu: str | float | None = None
    """Cores: ``"500m"``. AEnvironment's limit sets it, or else its request."""
    cpu_request: str | float | None = None
    cpu_limit: str | float | None = None
    memory: str | None = None
    """``"4Gi"``."""
    memory_request: str | None = None
    memory_limit: str | None = None
    ephemeral_storage: str | None = None
    """Size of the work directory, which ends with its sandbox."""
    ephemeral_storage_request: str | None = None
    ephemeral_storage_limit: str | None = None
    port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Port of a server in the sandbox, reached at ``/services/{name}/ports/{port}/``; 0: none."""
    storage_size: str | None = None
    """``"10Gi"``; an update may only increase it."""
    mount_path: str | None = None
    """Path of the storage in the sandbox."""

    def changes(self) -> dict[str, Any]:
        """Return the overrides as fields of `DeployChanges`; "" means the environment's value."""
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
    """Creates a service."""

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
    """None: as ``deployConfig.service`` says, or true if `storage_size` or `pvc_name` is given."""
    pvc_name: str | None = None
    """Distinguishes storage volumes of this service; it cannot name another service's storage."""


class ServiceUpdateRequest(_Resources):
    """Changes a service: omitted fields stay, and "" means the environment's value."""

    replicas: _Replicas | None = None
    autoscale: str | None = None
    """``min:max``; empty: no autoscaling."""
    env_name: Annotated[str | None, Field(alias="envName", max_length=200)] = None
    """Another version of the same environment."""
    environment_variables: dict[str, str] | None = Field(default=None, repr=False)
    engine: str | None = None
    """Does not convert the storage: a directory stays one, a Kubernetes claim too."""
    enable_storage: bool | None = None
    """True adds a storage volume to a service without one."""

    def may_start(self, record: ServiceRecord) -> bool:
        """Whether the update may start sandboxes: it does more than remove replicas."""
        changed = self.model_dump(exclude_none=True).keys() - {"replicas"}
        return bool(changed) or (self.replicas is not None and self.replicas > record.replicas)


class ServiceDeletion(NoQuery):
    """Parameters of a deletion."""

    deleteStorage: bool = False  # an alias would not work in every FastAPI
    """Delete the storage after its sandboxes; else a service of the same name gets it."""


class ServiceObject(BaseModel):
    """A service as AEnvironment's api-service writes it, with our own fields."""

    model_config = ConfigDict(frozen=True)

    id: str
    env: dict[str, Any]
    status: ServiceStatus
    created_at: str
    updated_at: str
    replicas: int
    available_replicas: int
    service_url: str
    """Base URL of its MCP and function routes."""
    owner: str
    environment_variables: dict[str, str]
    """Values are secrets, so they are masked."""
    pvc_name: str
    """Name of its storage; empty: it has none."""
    storage_size: str
    mount_path: str
    image: str
    """Empty: the environment's; the same holds for `cpu`, `memory` and `port`."""
    cpu: str
    memory: str
    ephemeral_storage: str
    port: int | None
    autoscale: str
    """``min:max``, or empty."""
    engine: str
    """Empty: the environment's, or one that the cluster chooses."""
    chosen_engine: str
    """Engines of the running sandboxes, if `engine` is empty; shown for a single service."""
    reason: str
    """Why it does not run as it should."""
    mcp_url: str


def service_object(
    record: ServiceRecord, state: ServiceState, url: str, entry: EnvironmentVersion | None
) -> ServiceObject:
    """Return a service as JSON."""
    scale, storage, changes = record.autoscale, record.storage, record.changes
    return ServiceObject(
        id=record.id,
        env=shown_environment(entry, record.reference, record.digest, record.created_at),
        status=state.status,
        created_at=timestamp(record.created_at),
        updated_at=timestamp(record.updated_at),
        replicas=state.target_replicas,
        available_replicas=state.available_replicas,
        service_url=url,
        owner=record.owner,
        environment_variables=masked_variables(record),
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
        chosen_engine="",
        reason=state.reason,
        mcp_url=f"{url}/mcp",
    )


def _first(*values: str | float | None) -> str | None:
    return next((str(value) for value in values if value is not None), None)
