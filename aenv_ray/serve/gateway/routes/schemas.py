"""The JSON of the control routes: what clients send and what they get.

Names and spellings are AEnvironment's where it has them, so that its client and CLI read them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from aenv_ray.errors import ConfigError
from aenv_ray.hub.records import EnvironmentVersion, FunctionSchema, Lease, Role, TokenRecord
from aenv_ray.models import InstanceStatus
from aenv_ray.units import parse_duration_s

Duration = str | float
"""``"30m"``, ``"2h"``, or seconds."""


LabelKey = Annotated[str, Field(min_length=1, max_length=200)]
LabelValue = Annotated[str, Field(max_length=1000)]


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as RFC 3339, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class _Asked(BaseModel):
    """Unknown fields are ignored, as AEnvironment's server does."""

    model_config = ConfigDict(frozen=True)


class _Query(BaseModel):
    """Unknown parameters are refused: a filter that does nothing would mislead."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- environments --------------------------------------------------------------------------------


class EnvironmentObject(_Answer):
    """An environment version as EnvHub writes it, and what ours has beyond that."""

    id: str
    name: str
    description: str
    version: str
    tags: list[str]
    code_url: str
    status: int
    artifacts: list[dict[str, Any]]
    build_config: dict[str, Any]
    test_config: dict[str, Any]
    deploy_config: dict[str, Any]
    created_at: str
    updated_at: str
    status_name: str
    digest: str
    archive: str
    archive_bytes: int
    owner: str | None
    functions: list[FunctionSchema] = Field(default_factory=list)
    """Only where one version was asked for."""

    @classmethod
    def of(cls, entry: EnvironmentVersion, *, is_whole: bool = False) -> EnvironmentObject:
        """Return the object of a version."""
        config = entry.config
        return cls(
            id=f"{entry.name}-{entry.version}",
            name=entry.name,
            description=entry.description,
            version=entry.version,
            tags=list(entry.tags),
            code_url=_text(config.get("codeUrl")),
            status=entry.status.number,
            artifacts=[
                artifact.model_dump(include={"id", "type", "content", "digest"})
                for artifact in entry.artifacts
            ],
            build_config=_object(config.get("buildConfig")),
            test_config=_object(config.get("testConfig")),
            deploy_config=_object(config.get("deployConfig")),
            created_at=timestamp(entry.created_at),
            updated_at=timestamp(entry.updated_at or entry.created_at),
            status_name=entry.status.value,
            digest=entry.digest,
            archive=entry.archive,
            archive_bytes=entry.archive_bytes,
            owner=entry.owner,
            functions=list(entry.functions) if is_whole else [],
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class EnvironmentFilter(_Query):
    """Which versions to list."""

    name: str | None = None
    tag: str | None = None
    text: str | None = None
    status: str | None = None
    latest: bool = False
    limit: int = Field(default=100, ge=1, le=1000)
    offset: int = Field(
        default=0, ge=0, le=100_000, description="Rows left out; a cursor is cheaper."
    )
    cursor: str | None = None


class ExistsObject(_Answer):
    """Whether a version is there."""

    exists: bool
    status: int | None = None


class StatusObject(_Answer):
    """The status of a version."""

    status: str


class StatusChange(_Asked):
    """Where a version goes."""

    status: str


class PublishRequest(_Asked):
    """A source archive that was uploaded, to be published."""

    archive: str = Field(pattern="^[0-9a-f]{64}$")
    allow_secrets: list[str] = Field(default_factory=list, max_length=1000)
    """Files, or patterns of them, that are published although they look like secrets."""


class ArtifactObject(_Answer):
    """An artifact that is kept."""

    digest: str
    size_bytes: int


class SignStyle(_Query):
    """What a signed URL is for."""

    style: Literal["read", "write"] = "write"


# --- instances -----------------------------------------------------------------------------------


class InstanceObject(_Answer):
    """An instance as AEnvironment's api-service writes it, and what ours has beyond that."""

    id: str
    env: dict[str, Any]
    status: InstanceStatus
    created_at: str
    updated_at: str
    ip: str
    """The name that stands for it on the data routes; empty in lists."""
    ttl: str
    owner: str
    labels: dict[str, str]
    engine: str
    deadline: str
    reason: str
    mcp_url: str


class CreateRequest(_Asked):
    """A new instance, as AEnvironment's client asks for it."""

    env_name: Annotated[str, Field(alias="envName", min_length=1, max_length=200)]
    datasource: str = Field(default="", max_length=1000)
    environment_variables: dict[str, str] | None = Field(default=None, repr=False)
    arguments: list[str] | None = None
    ttl: Duration | None = None
    owner: str | None = Field(default=None, max_length=200)
    labels: dict[LabelKey, LabelValue] | None = Field(default=None, max_length=100)

    @field_validator("ttl", mode="after")
    @classmethod
    def _check_ttl(cls, value: Duration | None) -> Duration | None:
        return _duration(value, "ttl")


class CreateManyRequest(CreateRequest):
    """New instances, all or none."""

    count: int = Field(default=1, ge=1, le=1000)
    engine: str | None = None
    idle_timeout: Duration | None = None
    actor: Literal["shared", "dedicated"] = "shared"
    wait: bool = True
    """Answer when they run; else at once, while they are Pending."""

    @field_validator("idle_timeout", mode="after")
    @classmethod
    def _check_idle(cls, value: Duration | None) -> Duration | None:
        return _duration(value, "idle_timeout")


def _duration(value: Duration | None, what: str) -> Duration | None:
    if value is None or value == "":
        return None
    try:
        parse_duration_s(value, what=what)
    except ConfigError as exc:
        # An answer has one hint for all that is wrong with a request: this is its field's.
        raise ValueError(f"{exc.message}: {exc.hint}") from None
    return value


class InstanceFilter(_Query):
    """Which instances to list."""

    owner: str | None = None
    label: str | None = Field(default=None, pattern="^[^=]+=.*$", description="key=value")
    status: InstanceStatus | None = None
    env: str | None = Field(default=None, description="name or name@version")
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class ReferenceFilter(_Query):
    """Paging of a list that AEnvironment's clients ask for."""

    limit: int = Field(default=1000, ge=1, le=1000)
    cursor: str | None = None


class WaitQuery(_Query):
    """How long to wait for a change."""

    wait_s: float = Field(default=0, ge=0, le=60)
    """Answer when the instance is no longer Pending, or after this long."""


class RenewRequest(_Asked):
    """More time."""

    ttl: Duration = "30m"


class ExecRequest(_Asked):
    """A command to run in an instance."""

    command: str | list[str]
    cwd: str | None = None
    env: dict[str, str] | None = Field(default=None, repr=False)
    stdin: str | None = Field(default=None, repr=False)
    """Base64."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """How to answer outputs; those that are no UTF-8 are base64 anyway."""
    timeout: float = Field(default=60, gt=0, le=86_400)


class ExecObject(_Answer):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    """Of both outputs; base64 where one is no UTF-8."""
    truncated: bool
    duration_s: float


class LogsQuery(_Query):
    """Which part of a log."""

    tail: int | None = Field(default=None, ge=0)
    follow: bool = False


# --- tokens, quotas, pools -----------------------------------------------------------------------


class TokenRequest(_Asked):
    """A new token."""

    role: Role
    owner: str = Field(min_length=1, max_length=200)
    instance_id: str | None = None
    ttl: Duration | None = None
    note: str = Field(default="", max_length=500)


class AgentTokenRequest(_Asked):
    """A token for the agent of one instance."""

    ttl: Duration | None = None
    note: str = Field(default="", max_length=500)


class TokenObject(TokenRecord):
    """A new token; its secret is told this once."""

    token: str


class QuotaRequest(_Asked):
    """How many instances a subject may have."""

    max_instances: int = Field(ge=0)


class QuotaObject(_Answer):
    """A quota and its use."""

    subject: str
    instances: int
    max_instances: int


class PoolRequest(_Asked):
    """Sandboxes to keep ready."""

    environment: str = Field(min_length=1, max_length=200)
    count: int = Field(ge=0, le=4096)


class PoolObject(_Answer):
    """Sandboxes that are kept ready."""

    environment: str
    count: int
    """How many were asked for here; 0: Ray code asked, or recent demand keeps them."""
    ready: int
    """How many there are now."""


def instance_object(
    lease: Lease, *, mcp_url: str, entry: EnvironmentVersion | None, is_private: bool
) -> InstanceObject:
    """Return the object of an instance.

    Args:
        lease: The hub's.
        mcp_url: Where MCP clients reach it.
        entry: Its environment, where it is at hand.
        is_private: The answer goes to its owner alone, and may carry the capability.
    """
    name, _, version = lease.reference.partition("@")
    entry = entry or EnvironmentVersion(
        name=name,
        version=version,
        digest=lease.digest,
        archive="",
        archive_bytes=0,
        config={},
        created_at=lease.created_at,
    )
    env = EnvironmentObject.of(entry).model_dump(exclude={"functions"})
    return InstanceObject(
        id=lease.id,
        env=env,
        status=lease.status,
        created_at=timestamp(lease.created_at),
        updated_at=timestamp(lease.created_at),
        ip=lease.capability if is_private and lease.status is InstanceStatus.RUNNING else "",
        ttl=f"{lease.deadline - lease.created_at if lease.ttl_s is None else lease.ttl_s:.0f}s",
        owner=lease.owner,
        labels=lease.labels,
        engine=lease.engine,
        deadline=timestamp(lease.deadline),
        reason=lease.reason,
        mcp_url=mcp_url,
    )
