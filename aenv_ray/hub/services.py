"""Records of services, stored among the hub's documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aenv_ray.errors import CatalogConflict, ConfigError, QuotaTooSmall, ServiceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.policy import Policy
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.storage import StorageMount
from aenv_ray.units import counted

KIND: Final = "service"
MAX_SERVICES: Final = 100
"""Number of services of one owner."""
MAX_OWNER_BYTES: Final = 8 * 1024 * 1024
"""Total size of the records of one owner, which every request to a service reads."""
MAX_REPLICAS: Final = 1000
_RETRY_S: Final = 10.0
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class Autoscale(BaseModel):
    """Limits between which Serve chooses the number of replicas, by concurrent calls."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)

    @model_validator(mode="after")
    def _check_order(self) -> Autoscale:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"{self.min_replicas} is more than {self.max_replicas}")
        return self

    @classmethod
    def parse(cls, text: str) -> Autoscale:
        """Parse ``min:max``.

        Raises:
            ConfigError: It is not two integers, at least 1 and in ascending order.
        """
        low, _, high = text.partition(":")
        try:
            return cls(min_replicas=int(low), max_replicas=int(high))
        except (ValueError, ValidationError):
            raise ConfigError(
                f"invalid autoscale {text!r}: expected min:max",
                hint=f"use two integers from 1 to {MAX_REPLICAS}, such as 1:4",
            ) from None


class ServiceRecord(BaseModel):
    """The desired state of a service; Serve knows the actual one."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Its name, unique in the cluster."""
    uid: str
    """Unguessable; new each time a service with this name is created."""
    reference: str
    """``name@version``, or the path of a project that Python code deployed."""
    digest: str
    """Digest of the project."""
    owner: str
    replicas: int = Field(ge=0, le=MAX_REPLICAS)
    """0 if the service is paused."""
    autoscale: Autoscale | None = None
    """None: the number of replicas is `replicas`."""
    environment_variables: dict[str, str] = Field(default_factory=dict, repr=False)
    engine: str | None = None
    """None: chosen as for an instance."""
    healthy_within_s: float = Field(default=120.0, gt=0)
    """A replica that is not healthy this long after its start has failed."""
    changes: DeployChanges = DeployChanges()
    """Changes to the environment's deployConfig."""
    storage: StorageMount | None = None
    """Storage that outlives its sandboxes and the service."""
    previous: ServiceRecord | None = None
    """The record before an update that is not healthy yet; None if the old replicas still serve."""
    taken_back: str = ""
    """Why the last update was rolled back; empty if it was not."""
    is_leaving: bool = False
    """It is being deleted and cannot change any more."""
    created_at: float
    """Seconds since the epoch, like `updated_at`."""
    updated_at: float

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas that it may have without an update."""
        if self.autoscale is None or self.replicas == 0:
            return self.replicas
        return self.autoscale.max_replicas

    @property
    def revision(self) -> str:
        """Digest of everything whose change replaces the replicas, without their number."""
        variables = sorted(self.environment_variables.items())
        parts: tuple[Any, ...] = (
            self.uid, self.reference, self.digest, self.engine, variables,
            *self.changes.model_dump(exclude_none=True).items(),
            *(() if self.storage is None else self.storage.model_dump().items()),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def check_room(
    record: ServiceRecord,
    before: ServiceRecord | None,
    others: Sequence[ServiceRecord],
    quota: int | None,
    policy: Policy,
) -> None:
    """Refuse a service for which its owner has no room.

    Args:
        record: The service.
        before: The record before this change; None: it is new. Only what grows is refused.
        others: The owner's other services.
        quota: The number of instances that the owner may have; None: any.
        policy: Limits their replicas.

    Raises:
        CatalogConflict: The owner has as many services, or as much text in them, as it may.
        PolicyRefused: Their replicas would be more than the operator allows.
        QuotaTooSmall: Their replicas would be more than the quota.
    """
    if before is None and len(others) >= MAX_SERVICES:
        raise CatalogConflict(
            f"{record.owner!r} has {len(others)} services, as many as an owner may",
            hint="delete unused ones: aenv service delete",
        )
    size = _size(record)
    held = sum(map(_size, others))
    if held + size > MAX_OWNER_BYTES and (before is None or size > _size(before)):
        raise CatalogConflict(
            f"the records of the services of {record.owner!r} have {held:,} bytes and may have "
            f"{MAX_OWNER_BYTES:,}: service {record.id} needs {size:,}",
            hint="use smaller environment variables, or delete unused services",
        )
    if before is not None and record.most_replicas <= before.most_replicas:
        return
    most = record.most_replicas + sum(one.most_replicas for one in others)
    policy.check_replicas(most, record.owner)
    if quota is not None and most > quota:
        raise QuotaTooSmall(
            f"the quota of owner:{record.owner} is {counted(quota, 'instance')}, and its "
            "services would have "
            f"{counted(most, 'replica')} with service {record.id}",
            retry_after_s=_RETRY_S,
            hint="use fewer replicas, pause other services, or have the quota raised",
        )


def _size(record: ServiceRecord) -> int:
    return len(record.model_dump_json())


def is_alone(record: ServiceRecord) -> bool:
    """Whether a service may have only one sandbox, because its storage has one writer."""
    return record.storage is not None and not record.storage.is_shared


def check_name(name: str) -> str:
    """Return the name of a service.

    Raises:
        ConfigError: It is not a valid DNS label.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid service name {name[:80]!r}",
            hint="use 1 to 63 of a-z, 0-9 and -, starting with a letter and not ending with -",
        )
    return name


class ServiceRecords:
    """The records of all services."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def all(self) -> dict[str, ServiceRecord]:
        """Return the records by id.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        documents = await self._hub.documents(KIND)
        return {name: ServiceRecord.model_validate(data) for name, data in documents.items()}

    async def get(self, service_id: str) -> ServiceRecord:
        """Return a record.

        Raises:
            ServiceNotFound: The service does not exist.
        """
        found = (await self.all()).get(service_id)
        if found is None:
            raise not_found(service_id)
        return found

    async def replace(self, old: ServiceRecord, new: ServiceRecord) -> bool:
        """Store a changed record if the stored one still is `old`; return whether it was."""
        kept = (await self._hub.documents(KIND)).get(old.id)
        if kept is None or ServiceRecord.model_validate(kept) != old:
            return False
        return await self._hub.replace_document(KIND, old.id, kept, new.model_dump(mode="json"))

    async def add(self, record: ServiceRecord) -> None:
        """Store a new record.

        Raises:
            CatalogConflict: A service with this name exists.
        """
        data: dict[str, Any] = record.model_dump(mode="json")
        if not await self._hub.replace_document(KIND, record.id, None, data):
            raise CatalogConflict(
                f"service {record.id} already exists",
                hint="change it with aenv service update, or choose another name",
            )

    async def delete(self, record: ServiceRecord) -> None:
        """Delete the record of a service, even if it was changed; its name is free again.

        Another service that has the name by now keeps its record.
        """
        while True:
            kept = (await self._hub.documents(KIND)).get(record.id)
            if kept is None or ServiceRecord.model_validate(kept).uid != record.uid:
                return
            if await self._hub.delete_document(KIND, record.id, kept):
                return


def not_found(service_id: str) -> ServiceNotFound:
    """Return the error for a service that does not exist, or belongs to another owner."""
    return ServiceNotFound(
        f"there is no service {service_id}", hint="aenv service list shows your services"
    )
