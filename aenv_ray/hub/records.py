"""The records of the hub: environment versions, leases of instances, tokens, quotas."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Field

from aenv_ray.errors import InstanceNotFound
from aenv_ray.models import Frozen, InstanceStatus
from aenv_ray.project.config import Artifact

Item = TypeVar("Item")


class Page(Frozen, Generic[Item]):
    """One page of a listing."""

    items: tuple[Item, ...]
    cursor: str | None = None
    """Pass it to the same query for the next page; None on the last page."""
    total: int
    """Size of the whole listing, as far as its filters are indexed."""


# --- environments --------------------------------------------------------------------------------


class EnvironmentStatus(StrEnum):
    """The status of a version; `number` is the integer that AEnvironment's EnvHub uses."""

    INIT = "Init"
    PENDING = "Pending"
    CREATING = "Creating"
    CREATED = "Created"
    TESTING = "Testing"
    VERIFIED = "Verified"
    READY = "Ready"
    RELEASED = "Released"
    FAILED = "Failed"

    @property
    def number(self) -> int:
        """The status as EnvHub's integer, from 0."""
        return list(EnvironmentStatus).index(self)


class FunctionSchema(Frozen):
    """A function that the code of an environment registers."""

    kind: Literal["tool", "function", "reward", "health"]
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)
    """JSON Schema of its arguments."""
    endpoint: str | None = None
    """Path on the public door."""
    method: str | None = None
    """HTTP method on the public door."""


class EnvironmentVersion(Frozen):
    """A published version of an environment, whose content never changes (invariant 6)."""

    name: str
    version: str
    digest: str
    """Digest of the source, see `aenv_ray.project.project.Project.digest`."""
    archive: str
    """SHA-256 of the source archive, its name in the artifact store."""
    archive_bytes: int
    config: dict[str, Any]
    """The whole ``config.json``, including unknown fields."""
    artifacts: tuple[Artifact, ...] = ()
    """Images and other artifacts; part of the content."""
    functions: tuple[FunctionSchema, ...] = ()
    description: str = ""
    tags: tuple[str, ...] = ()
    status: EnvironmentStatus = EnvironmentStatus.READY
    owner: str | None = None
    """Who published it."""
    created_at: float = 0.0
    """Seconds since the epoch, set by the hub."""
    updated_at: float = 0.0
    """When its status last changed."""

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


class Right(StrEnum):
    """What a grant allows."""

    USE = "use"
    """See the environment, read its archive, create instances and services of it."""
    PUBLISH = "publish"
    """What `USE` allows, and publish versions."""


EVERYBODY: Final = "*"
"""In a grant: all owners."""


class NameRecord(Frozen):
    """Who may publish and use the environments of one name."""

    name: str
    owner: str | None
    """The first publisher; None: nobody has published it with an owner."""
    grants: dict[str, Right] = Field(default_factory=dict)
    """By owner, or `EVERYBODY`."""

    def may(self, owner: str, right: Right) -> bool:
        """Whether an owner has a right (invariant 15)."""
        return self.owner in (None, owner) or self.grants_to(owner, right)

    def grants_to(self, owner: str, right: Right) -> bool:
        """Whether an owner has a right by a grant."""
        given = {self.grants.get(owner), self.grants.get(EVERYBODY)}
        return right in given or Right.PUBLISH in given


class EnvironmentQuery(Frozen):
    """Filters for versions; all given ones must match."""

    name: str | None = None
    tag: str | None = None
    text: str | None = None
    """Words to search for in name, description and tags; case-insensitive."""
    status: EnvironmentStatus | None = None
    latest_only: bool = False
    """List only the highest version of each name."""
    visible_to: str | None = None
    """List only what this owner may use."""
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class ArtifactsHeld(NamedTuple):
    """The artifacts of one owner."""

    size_bytes: int
    """Their total size."""
    number: int


# --- audit log -----------------------------------------------------------------------------------


_AUDIT_CHARACTERS: Final = 300


def _cut(text: str) -> str:
    return text[:_AUDIT_CHARACTERS]


_Cut = Annotated[str, AfterValidator(_cut)]
"""A text of which the log keeps the beginning, because a client chooses it."""


class AuditRecord(Frozen):
    """Who changed what, when and with which outcome; never a secret (invariant 10)."""

    at: float = 0.0
    """Seconds since the epoch, set by the hub."""
    id: str = ""
    """Set by the hub; ids grow."""
    actor: str
    """The owner of the token, or the user who ran a command on the cluster."""
    role: str = ""
    token_id: str = ""
    action: str
    """``publish``, ``status``, ``delete``, ``token.create``, ``token.revoke``, ``grant.set``,
    ``grant.revoke``, ``quota.set``, ``quota.delete``, ``pool.set``, ``hub.restore``
    or ``policy``."""
    subject: _Cut = ""
    """The object of the action: a version, a name, the id of a token …"""
    outcome: str = "ok"
    """``ok``, ``not_found``, or the code of the error."""
    detail: dict[str, _Cut] = Field(default_factory=dict)
    request_id: str = ""


# --- leases --------------------------------------------------------------------------------------


class Lease(Frozen):
    """An instance as the hub accounts for it: owner, deadline and capability."""

    id: str
    """The instance's id."""
    reference: str
    digest: str
    owner: str
    labels: dict[str, str] = Field(default_factory=dict)
    engine: str = ""
    status: InstanceStatus = InstanceStatus.PENDING
    created_at: float
    deadline: float
    """Seconds since the epoch; the lease is deleted some time after it."""
    ttl_s: float | None = None
    """The TTL at its creation; None if unknown."""
    capability: str
    """Unguessable lower-case name that identifies the instance on routes without a token.

    Clients see it only as part of an address, see `Signer.address`.
    """
    reason: str = ""
    """Why it failed."""
    made_by: str = ""
    """The gateway replica that creates the instance; a Pending lease ends with that replica."""
    places: int = Field(default=1, ge=0)
    """How many instances quotas count it for, see `InstanceSpec.places`."""


class LeaseQuery(Frozen):
    """Filters for leases; all given ones must match."""

    owner: str | None = None
    name: str | None = None
    """Name of the environment."""
    version: str | None = None
    status: InstanceStatus | None = None
    label: tuple[str, str] | None = None
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class Quota(Frozen):
    """Limit of the instances that a subject has at once."""

    subject: str
    """``owner:<name>``, or ``label:<key>=<value>`` such as ``label:experiment=a``."""
    max_instances: int = Field(ge=0)


class KeyGroup(Frozen):
    """Limit of the idempotency keys that somebody may store at once."""

    name: str
    most: int = Field(ge=0)


# --- tokens --------------------------------------------------------------------------------------


class Role(StrEnum):
    """What a token may do."""

    ADMIN = "admin"
    """Everything."""
    PUBLISHER = "publisher"
    """What a user may, and publish environments. Tokens with the earlier role ``owner`` have it."""
    USER = "user"
    """See and use environments; create, use and end instances and services of its owner."""
    AGENT = "agent"
    """List and call the tools of one instance (invariant 8)."""

    @classmethod
    def _missing_(cls, value: object) -> Role | None:
        return cls.PUBLISHER if value == "owner" else None

    def includes(self, other: Role) -> bool:
        """Whether this role may do everything that the other one may."""
        order = list(Role)
        return order.index(self) <= order.index(other)


class TokenRecord(Frozen):
    """A token without its secret, of which the hub stores only a hash."""

    id: str
    role: Role
    owner: str
    instance_id: str | None = None
    """The instance of a token with role agent."""
    note: str = ""
    created_at: float
    expires_at: float | None = None
    """Seconds since the epoch; None: it does not expire."""
    made_by: str = ""
    """Id of the token that created a token with role agent, which ends with it; "": unknown."""


def unknown_address() -> InstanceNotFound:
    """Return the error for an address of no instance, which it does not repeat: it is a secret."""
    return InstanceNotFound(
        "no instance has this address",
        hint="use the address that creating the instance returned",
    )


def unknown_instance(instance_id: str) -> InstanceNotFound:
    """Return the error for an instance that has no lease.

    It is also the error for an instance of another owner: the two must not be distinguishable.
    """
    return InstanceNotFound(
        f"there is no instance {instance_id}",
        instance_id=instance_id,
        hint="create another instance: it ended some time ago, or never existed",
    )
