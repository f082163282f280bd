"""Services as the hub keeps them: one record each, among its documents."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aenv_ray.errors import CatalogConflict, ConfigError, ServiceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.storage import StorageMount

KIND: Final = "service"
_LAST_KIND: Final = "service-last"
"""Of each name that is free again: the service that had it last."""
_CLAIM_S: Final = 10.0
MAX_REPLICAS: Final = 1000
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class Autoscale(BaseModel):
    """Between which numbers of replicas Serve chooses, by the calls that are under way."""

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
        """Return what ``min:max`` says.

        Raises:
            ConfigError: It is not two whole numbers from 1 on, the smaller first.
        """
        low, _, high = text.partition(":")
        try:
            return cls(min_replicas=int(low), max_replicas=int(high))
        except (ValueError, ValidationError):
            raise ConfigError(
                f"autoscale {text!r} is not min:max",
                hint=f"write two whole numbers from 1 to {MAX_REPLICAS}, such as 1:4",
            ) from None


class ServiceRecord(BaseModel):
    """What a service should be; what it is Serve knows."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Its name, unique in the cluster."""
    uid: str
    """Unguessable; another one each time a service of this name is created."""
    reference: str
    """``name@version``, or a project's path where Python code deployed that."""
    digest: str
    """Of the project's content."""
    owner: str
    replicas: int = Field(ge=0, le=MAX_REPLICAS)
    """0: parked."""
    autoscale: Autoscale | None = None
    """None: `replicas` is what there is."""
    environment_variables: dict[str, str] = Field(default_factory=dict, repr=False)
    engine: str | None = None
    """None: as an instance's."""
    healthy_within_s: float = Field(default=120.0, gt=0)
    """A replica whose environment is not healthy so long after its start has failed."""
    changes: DeployChanges = DeployChanges()
    """What its sandboxes have otherwise than the environment says."""
    storage: StorageMount | None = None
    """What outlives its sandboxes, and the service."""
    previous: ServiceRecord | None = None
    """What it was before an update that is not healthy yet, where nothing else can serve."""
    taken_back: str = ""
    """Why the last update was taken back; empty: it was not."""
    is_leaving: bool = False
    """It is being deleted: nothing changes it any more."""
    created_at: float
    """Seconds since the epoch, like `updated_at`."""
    updated_at: float

    @property
    def revision(self) -> str:
        """What tells replicas apart that have to be replaced by a roll; numbers do not matter."""
        variables = sorted(self.environment_variables.items())
        parts: tuple[Any, ...] = (
            self.uid, self.reference, self.digest, self.engine, variables,
            *self.changes.model_dump(exclude_none=True).items(),
            *(() if self.storage is None else self.storage.model_dump().items()),
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def is_alone(record: ServiceRecord) -> bool:
    """Whether a service has one sandbox at a time: its storage has one writer."""
    return record.storage is not None and not record.storage.is_shared


def check_name(name: str) -> str:
    """Return a service's name.

    Raises:
        ConfigError: It is none that DNS could carry.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"service name {name[:80]!r} is not valid",
            hint="1 to 63 of a-z, 0-9 and -, beginning with a letter, not ending with -",
        )
    return name


class ServiceRecords:
    """The records of all services.

    Args:
        hub: Keeps them.
    """

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
        """Return one.

        Raises:
            ServiceNotFound: There is none.
        """
        found = (await self.all()).get(service_id)
        if found is None:
            raise not_found(service_id)
        return found

    async def put(self, record: ServiceRecord) -> None:
        """Keep a new record."""
        data: dict[str, Any] = record.model_dump(mode="json")
        await self._hub.put_document(KIND, record.id, data)

    async def replace(self, old: ServiceRecord, new: ServiceRecord) -> bool:
        """Keep a changed record; False when the old one is not what is kept any more."""
        kept = (await self._hub.documents(KIND)).get(old.id)
        if kept is None or ServiceRecord.model_validate(kept) != old:
            return False
        return await self._hub.replace_document(KIND, old.id, kept, new.model_dump(mode="json"))

    async def claim(self, record: ServiceRecord) -> None:
        """Take a name for a service that is about to be made.

        Raises:
            CatalogConflict: There is a service of this name, or somebody else is making one.
        """
        last = (await self._hub.documents(_LAST_KIND)).get(record.id, {}).get("uid", "")
        key = f"service-name:{record.id}:{last}"
        is_first = await self._hub.remember(key, record.uid, _CLAIM_S) == record.uid
        if not is_first or record.id in await self.all():
            raise CatalogConflict(
                f"there is a service {record.id} already",
                hint="change it with aenv service update, or choose another name",
            )

    async def delete(self, record: ServiceRecord) -> None:
        """Forget one; its name is free again."""
        await self._hub.put_document(_LAST_KIND, record.id, {"uid": record.uid})
        await self._hub.delete_document(KIND, record.id)


def not_found(service_id: str) -> ServiceNotFound:
    """Return the error for a service that is not there, or is somebody else's."""
    return ServiceNotFound(
        f"there is no service {service_id}", hint="aenv service list names yours"
    )
