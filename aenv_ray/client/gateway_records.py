"""Records of the gateway's REST API. Unknown fields are kept and shown."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.records import EnvironmentStatus
from aenv_ray.validation import problems_of


class GatewayRecord(BaseModel):
    """An object of a response."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def read(cls, data: Any) -> Self:
        """Return the data of a response.

        Raises:
            FabricUnavailable: The data has another shape, so the server is not a gateway.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            problems = problems_of(exc, whole="the response")
            raise FabricUnavailable(
                f"this is not the response of a gateway: {problems}",
                hint="check the address and the version of the gateway with: aenv hub status",
            ) from exc

    def shown(self) -> dict[str, Any]:
        """Return the object as JSON data, as it was received."""
        return self.model_dump(mode="json", exclude_unset=True)


class EnvironmentAnswer(GatewayRecord):
    """A version of an environment: the fields of EnvHub, AEnvironment's hub, and ours."""

    name: str
    version: str
    description: str = ""
    tags: list[str] | None = None
    status: int | str = ""
    status_name: str = ""
    digest: str = ""
    archive: str = ""
    """SHA-256 of the source archive; empty if the hub has none."""
    archive_bytes: int = 0
    owner: str | None = None
    created_at: str | float | None = None
    functions: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def status_word(self) -> str:
        """The status by name; EnvHub sends a number."""
        known = [status.value for status in EnvironmentStatus]
        if self.status_name or not isinstance(self.status, int):
            return self.status_name or str(self.status)
        return known[self.status] if 0 <= self.status < len(known) else str(self.status)


class InstanceAnswer(GatewayRecord):
    """An instance: fields of AEnvironment's EnvInstance and ours."""

    id: str
    status: str = ""
    env: dict[str, Any] | str | None = None
    owner: str | None = None
    engine: str = ""
    ip: str | None = None
    created_at: str | float | None = None
    deadline: str | float | None = None
    labels: dict[str, str] | None = None
    reason: str | None = None
    mcp_url: str | None = None

    @property
    def environment(self) -> str:
        """``name@version``, or as much of it as the gateway sent."""
        return _environment(self.env)


class ServiceAnswer(GatewayRecord):
    """A service: fields of AEnvironment's EnvService and ours."""

    id: str
    status: str = ""
    env: dict[str, Any] | str | None = None
    owner: str | None = None
    replicas: int = 0
    available_replicas: int = 0
    autoscale: str = ""
    service_url: str = ""
    mcp_url: str = ""
    engine: str = ""
    chosen_engine: str = ""
    image: str = ""
    cpu: str = ""
    memory: str = ""
    port: int | None = None
    pvc_name: str = ""
    storage_size: str = ""
    mount_path: str = ""
    environment_variables: dict[str, str] | None = None
    created_at: str | float | None = None
    updated_at: str | float | None = None
    reason: str = ""

    @property
    def environment(self) -> str:
        """``name@version``, or as much of it as the gateway sent."""
        return _environment(self.env)


class TokenAnswer(GatewayRecord):
    """A token; the response that creates it also has its secret."""

    id: str
    role: str = ""
    owner: str = ""
    token: str | None = Field(default=None, repr=False)
    instance_id: str | None = None
    note: str = ""
    created_at: str | float | None = None
    expires_at: str | float | None = None


class PoolAnswer(GatewayRecord):
    """The sandboxes that are kept ready for an environment."""

    environment: str
    count: int = 0
    """How many are wanted."""
    ready: int = 0


class NodeAnswer(GatewayRecord):
    """A node of the cluster."""

    node_id: str
    machine: str = ""
    status: str = ""
    instances: int = 0
    runners: int = 0
    replicas: int = 0
    silent: int = 0
    """Hosts that do not answer, and may have instances."""


class NameAnswer(GatewayRecord):
    """Who may use and publish the environments of a name."""

    name: str
    owner: str | None = None
    grants: dict[str, str] = Field(default_factory=dict)
    """Rights by owner, or ``*`` for all."""


class AuditAnswer(GatewayRecord):
    """A record of the audit log."""

    at: float = 0.0
    """Seconds since the epoch."""
    id: str
    actor: str = ""
    role: str = ""
    token_id: str = ""
    action: str = ""
    subject: str = ""
    outcome: str = ""
    detail: dict[str, Any] = Field(default_factory=dict)
    request_id: str = ""


class HubAnswer(GatewayRecord):
    """The hub's status."""

    redis: str = ""
    """Where its Redis is."""
    redis_version: str = ""
    append_only: bool = False
    memory_bytes: int = 0
    redis_uptime_s: int = 0
    environment_versions: int = 0
    leases: int = 0


class HealthAnswer(GatewayRecord):
    """The gateway's health."""

    status: str = ""


def _environment(env: dict[str, Any] | str | None) -> str:
    if isinstance(env, dict):
        return "@".join(str(env[k]) for k in ("name", "version") if env.get(k))
    return env or ""
