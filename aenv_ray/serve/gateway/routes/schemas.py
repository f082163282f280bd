"""The JSON of the control routes: requests and answers.

Fields that AEnvironment has keep its names and spelling, so that its client and CLI read them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from aenv_ray.errors import ConfigError
from aenv_ray.hub.records import EnvironmentVersion, FunctionSchema, Lease, Right, Role, TokenRecord
from aenv_ray.models import InstanceStatus
from aenv_ray.units import parse_duration_s

Duration = str | float
"""``"30m"``, ``"2h"``, or seconds."""


LabelKey = Annotated[str, Field(min_length=1, max_length=200)]
LabelValue = Annotated[str, Field(max_length=1000)]


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as RFC 3339, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True)


class RequestBody(BaseModel):
    """Unknown fields are ignored, as in AEnvironment's server."""

    model_config = ConfigDict(frozen=True)


class NoQuery(BaseModel):
    """Unknown parameters are refused: a filter without an effect would mislead."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- environments --------------------------------------------------------------------------------


class EnvironmentObject(_Reply):
    """An environment version as AEnvironment's EnvHub writes it, with our own fields."""

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
    """Only in answers about a single version."""

    @classmethod
    def of(
        cls, entry: EnvironmentVersion, *, is_whole: bool = False, is_private: bool = False
    ) -> EnvironmentObject:
        """Return a version as JSON; `is_whole`: with its functions.

        Values of variables and build arguments are masked, unless only those who may change the
        version see the answer (`is_private`).
        """
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
            build_config=_masked(config, "buildConfig", is_private=is_private),
            test_config=_object(config.get("testConfig")),
            deploy_config=_masked(config, "deployConfig", is_private=is_private),
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


_SECRET: Final = ("environmentVariables", "environment_variables", "env", "build_args")


def _masked(config: dict[str, Any], section: str, *, is_private: bool) -> dict[str, Any]:
    """Return a section of config.json, without the values that may be secrets (invariant 10)."""
    found = _object(config.get(section))
    if is_private:
        return found
    secret = {name: dict.fromkeys(_object(found[name]), "***") for name in _SECRET if name in found}
    return found | secret


class GrantRequest(RequestBody):
    """What to grant."""

    right: Right


class EnvironmentFilter(NoQuery):
    """Which versions to list."""

    name: str | None = None
    tag: str | None = None
    text: str | None = None
    status: str | None = None
    latest: bool = False
    limit: int = Field(default=100, ge=1, le=1000)
    offset: int = Field(
        default=0, ge=0, le=100_000, description="Rows to skip; a cursor is faster."
    )
    cursor: str | None = None


class ExistsObject(_Reply):
    """Whether a version exists."""

    exists: bool
    status: int | None = None


class StatusObject(_Reply):
    """The status of a version."""

    status: str


class StatusChange(RequestBody):
    """A new status for a version."""

    status: str


class PublishRequest(RequestBody):
    """Publishes an uploaded source archive."""

    archive: str = Field(pattern="^[0-9a-f]{64}$")
    allow_secrets: list[str] = Field(default_factory=list, max_length=1000)
    """Files, or patterns, to publish although they look like secrets."""


class ArtifactObject(_Reply):
    """A stored artifact."""

    digest: str
    size_bytes: int


class SignStyle(NoQuery):
    """What a signed URL is for."""

    style: Literal["read", "write"] = "write"


# --- instances -----------------------------------------------------------------------------------


class InstanceObject(_Reply):
    """An instance as AEnvironment's api-service writes it, with our own fields."""

    id: str
    env: dict[str, Any]
    status: InstanceStatus
    created_at: str
    updated_at: str
    ip: str
    """Names the instance on the data routes, while the caller's token is valid. Empty in lists."""
    ttl: str
    owner: str
    labels: dict[str, str]
    engine: str
    deadline: str
    reason: str
    mcp_url: str


class CreateRequest(RequestBody):
    """Creates an instance, as AEnvironment's client requests it."""

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
    """Creates instances, all or none."""

    count: int = Field(default=1, ge=1, le=1000)
    engine: str | None = None
    idle_timeout: Duration | None = None
    actor: Literal["shared", "dedicated"] = "shared"
    wait: bool = True
    """Answer when they run; false: at once, while they are Pending."""

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
        # An answer has one hint for all invalid fields, so this field's hint goes into its message.
        raise ValueError(f"{exc.message}: {exc.hint}") from None
    return value


class InstanceFilter(NoQuery):
    """Which instances to list."""

    owner: str | None = None
    label: str | None = Field(default=None, pattern="^[^=]+=.*$", description="key=value")
    status: InstanceStatus | None = None
    env: str | None = Field(default=None, description="name or name@version")
    limit: int = Field(default=100, ge=1, le=1000)
    cursor: str | None = None


class ReferenceFilter(NoQuery):
    """Paging of AEnvironment's list of instances."""

    limit: int = Field(default=1000, ge=1, le=1000)
    cursor: str | None = None


class WaitQuery(NoQuery):
    """How long to wait for a Pending instance."""

    wait_s: float = Field(default=0, ge=0, le=60)
    """Answer when the instance is no longer Pending, or after this time."""


class RenewRequest(RequestBody):
    """Extends the lifetime of an instance to this time from now."""

    ttl: Duration = "30m"


class ExecRequest(RequestBody):
    """Runs a command in an instance."""

    command: str | list[str]
    cwd: str | None = None
    env: dict[str, str] | None = Field(default=None, repr=False)
    stdin: str | None = Field(default=None, repr=False)
    """Base64."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """Encoding of the outputs; outputs that are not UTF-8 are always base64."""
    timeout: float = Field(default=60, gt=0, le=86_400)


class ExecObject(_Reply):
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str
    encoding: Literal["utf-8", "base64"]
    """The encoding of both outputs; base64 if one is not UTF-8."""
    truncated: bool
    duration_s: float


class LogsTail(NoQuery):
    """Which part of a log."""

    tail: int | None = Field(default=None, ge=0)


class LogsQuery(LogsTail):
    """Which part of a log, and whether to wait for more."""

    follow: bool = False


# --- tokens, quotas, pools -----------------------------------------------------------------------


class TokenRequest(RequestBody):
    """Creates a token."""

    role: Role = Role.USER
    owner: str = Field(min_length=1, max_length=200)
    instance_id: str | None = None
    ttl: Duration | None = None
    note: str = Field(default="", max_length=500)


class AgentTokenRequest(RequestBody):
    """Creates an agent token for an instance."""

    ttl: Duration | None = None
    note: str = Field(default="", max_length=500)


class TokenObject(TokenRecord):
    """A new token, with its secret."""

    token: str


class AuditFilter(NoQuery):
    """Which part of the audit log."""

    limit: int = Field(default=100, ge=1, le=1000)
    before: str | None = Field(default=None, description="Only records older than this id.")


class QuotaRequest(RequestBody):
    """Sets how many instances a subject may have."""

    max_instances: int = Field(ge=0)


class QuotaObject(_Reply):
    """A quota and its use."""

    subject: str
    instances: int
    max_instances: int


class PoolRequest(RequestBody):
    """Sets how many sandboxes to keep ready."""

    environment: str = Field(min_length=1, max_length=200)
    count: int = Field(ge=0, le=4096)


class PoolObject(_Reply):
    """The sandboxes that are kept ready for an environment."""

    environment: str
    count: int
    """The number that PUT /pools has set; 0: Ray code or recent demand keeps them ready."""
    ready: int
    """Sandboxes that are ready now."""


def instance_object(
    lease: Lease, *, mcp_url: str, entry: EnvironmentVersion | None, address: str
) -> InstanceObject:
    """Return an instance as JSON; `address` is shown while it runs."""
    return InstanceObject(
        id=lease.id,
        env=shown_environment(entry, lease.reference, lease.digest, lease.created_at),
        status=lease.status,
        created_at=timestamp(lease.created_at),
        updated_at=timestamp(lease.created_at),
        ip=address if lease.status is InstanceStatus.RUNNING else "",
        ttl=f"{lease.deadline - lease.created_at if lease.ttl_s is None else lease.ttl_s:.0f}s",
        owner=lease.owner,
        labels=lease.labels,
        engine=lease.engine,
        deadline=timestamp(lease.deadline),
        reason=lease.reason,
        mcp_url=mcp_url,
    )


def shown_environment(
    entry: EnvironmentVersion | None, reference: str, digest: str, created_at: float
) -> dict[str, Any]:
    """Return the environment of an instance or service as JSON.

    Args:
        entry: The published version of this reference, None if there is none. One with another
            digest is not shown: it is another environment than the built-in one, or the project,
            that the instance was created from, and may belong to another owner (invariant 15).
        reference: ``name@version``, or a path.
        digest: The digest of what the instance or service was created from.
        created_at: Shown as that of the environment if there is no entry.
    """
    if entry is None or entry.digest != digest:
        name, _, version = reference.rpartition("/")[2].partition("@")
        entry = EnvironmentVersion(
            name=name, version=version, digest=digest, archive="", archive_bytes=0, config={},
            created_at=created_at,
        )  # fmt: skip
    return EnvironmentObject.of(entry).model_dump(exclude={"functions"})
