"""What the hub keeps: environment versions, leases of instances, tokens, quotas."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.models import InstanceStatus
from aenv_ray.project.config import Artifact


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


Item = TypeVar("Item")


class Page(_Frozen, Generic[Item]):
    """One page of a listing."""

    items: tuple[Item, ...]
    cursor: str | None = None
    """Give it to the same query for what follows; None at the end."""
    total: int
    """Of the whole listing, as far as its filters are indexed."""


# --- environments --------------------------------------------------------------------------------


class EnvironmentStatus(StrEnum):
    """Where a version is in its life; `number` is how AEnvironment's EnvHub writes it."""

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


class FunctionSchema(_Frozen):
    """One function that an environment registers, as loading its code showed it."""

    kind: Literal["tool", "function", "reward", "health"]
    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)
    """JSON Schema of its arguments."""
    endpoint: str | None = None
    """Path of a function on the public door."""
    method: str | None = None
    """HTTP method of a function on the public door."""


class EnvironmentVersion(_Frozen):
    """One published version of an environment. Its content never changes (invariant 6)."""

    name: str
    version: str
    digest: str
    """Of the source, as `aenv_ray.project.project.Project.digest`: what instances of it run."""
    archive: str
    """SHA-256 of the source archive, its name in the artifact store."""
    archive_bytes: int
    config: dict[str, Any]
    """The whole ``config.json``, with fields that we do not know."""
    artifacts: tuple[Artifact, ...] = ()
    """Images and the like; part of the content."""
    functions: tuple[FunctionSchema, ...] = ()
    description: str = ""
    tags: tuple[str, ...] = ()
    status: EnvironmentStatus = EnvironmentStatus.READY
    owner: str | None = None
    """Who pushed it."""
    created_at: float = 0.0
    """Seconds since the epoch; the hub sets it."""
    updated_at: float = 0.0
    """When its status was last set."""

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


class EnvironmentQuery(_Frozen):
    """Which versions to list; every filter that is given must hold."""

    name: str | None = None
    tag: str | None = None
    text: str | None = None
    """Words to be found in name, description or tags; case does not matter."""
    status: EnvironmentStatus | None = None
    latest_only: bool = False
    """Of each name the highest version alone."""
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


# --- leases --------------------------------------------------------------------------------------


class Lease(_Frozen):
    """An instance as the hub accounts for it: whose it is, until when, and by which name."""

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
    """Seconds since the epoch; a lease is gone some time after it."""
    ttl_s: float | None = None
    """What it was made with; None: that is not known."""
    capability: str
    """Unguessable lower-case name that stands for the instance on routes without a token."""
    reason: str = ""
    """Why it failed."""
    made_by: str = ""
    """The gateway replica that makes it: while it is Pending, it ends with that replica."""


class LeaseQuery(_Frozen):
    """Which leases to list; every filter that is given must hold."""

    owner: str | None = None
    name: str | None = None
    """Of the environment."""
    version: str | None = None
    status: InstanceStatus | None = None
    label: tuple[str, str] | None = None
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class Quota(_Frozen):
    """How many instances a subject may have at once."""

    subject: str
    """``owner:<name>``, or ``label:<key>=<value>`` such as ``label:experiment=a``."""
    max_instances: int = Field(ge=0)


# --- tokens --------------------------------------------------------------------------------------


class Role(StrEnum):
    """What a token may do."""

    ADMIN = "admin"
    """Everything."""
    OWNER = "owner"
    """Push and read environments; make, use and end instances and services of its owner."""
    AGENT = "agent"
    """List and call the tools of one instance (invariant 8)."""


class TokenRecord(_Frozen):
    """A token without its secret, of which the hub keeps a hash alone."""

    id: str
    role: Role
    owner: str
    instance_id: str | None = None
    """Of an agent's token: the one instance it is for."""
    note: str = ""
    created_at: float
    expires_at: float | None = None
    """Seconds since the epoch; None: until it is revoked."""
