"""The JSON of the service routes, in AEnvironment's spelling where it has one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.hub.records import EnvironmentVersion
from aenv_ray.hub.services import MAX_REPLICAS, ServiceRecord
from aenv_ray.serve.service import masked
from aenv_ray.serve.service_apps import ServiceState, ServiceStatus
from aenv_ray.serve.shapes import EnvironmentObject, timestamp

_Replicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]


class _Asked(BaseModel):
    """Unknown fields are ignored, as AEnvironment's server does."""

    model_config = ConfigDict(frozen=True)


class ServiceCreateRequest(_Asked):
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
    pvc_name: str | None = None
    storage_size: str | None = None


class ServiceUpdateRequest(_Asked):
    """What changes; what is not named stays."""

    replicas: _Replicas | None = None
    autoscale: str | None = None
    """``min:max``; empty: none any more."""
    env_name: Annotated[str | None, Field(alias="envName", max_length=200)] = None
    """Another version of its environment."""
    environment_variables: dict[str, str] | None = Field(default=None, repr=False)
    image: str | None = None


class ServiceFilter(BaseModel):
    """Parameters of the list; none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServiceDeletion(BaseModel):
    """Parameters of a deletion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    delete_storage: bool = Field(default=False, alias="deleteStorage")
    """A service has no storage: there is nothing to delete."""


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
    """Empty: it has no storage."""
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
    scale = record.autoscale
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
        pvc_name="",
        autoscale="" if scale is None else f"{scale.min_replicas}:{scale.max_replicas}",
        engine=record.engine or "",
        reason=state.reason,
        mcp_url=f"{url}/mcp",
    )
