"""What a gateway answers: environments, instances and tokens, with fields that we do not know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.records import EnvironmentStatus


class Answer(BaseModel):
    """An object of an answer; all that came is kept and shown."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def shown(self) -> dict[str, Any]:
        """Return it as JSON data, as it came."""
        return self.model_dump(mode="json", exclude_unset=True)


class EnvironmentAnswer(Answer):
    """A version of an environment, as EnvHub writes it, and our fields."""

    name: str
    version: str
    description: str = ""
    tags: list[str] | None = None
    status: int | str = ""
    status_name: str = ""
    digest: str = ""
    archive: str = ""
    """SHA-256 of its source archive; empty: it has none here."""
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
        """Its status by name, where EnvHub sends a number."""
        known = [status.value for status in EnvironmentStatus]
        if self.status_name or not isinstance(self.status, int):
            return self.status_name or str(self.status)
        return known[self.status] if 0 <= self.status < len(known) else str(self.status)


class InstanceAnswer(Answer):
    """An instance, as AEnvironment's EnvInstance, and our fields."""

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
        """``name@version``, as far as it is told."""
        return _environment(self.env)


class ServiceAnswer(Answer):
    """A service, as AEnvironment's EnvService, and our fields."""

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
        """``name@version``, as far as it is told."""
        return _environment(self.env)


class TokenAnswer(Answer):
    """A token; its secret only when it was just made."""

    id: str
    role: str = ""
    owner: str = ""
    token: str | None = Field(default=None, repr=False)
    instance_id: str | None = None
    note: str = ""
    created_at: str | float | None = None
    expires_at: str | float | None = None


def _environment(env: dict[str, Any] | str | None) -> str:
    if isinstance(env, dict):
        return "@".join(str(env[k]) for k in ("name", "version") if env.get(k))
    return env or ""


def parse(model: type[Any], data: Any, what: str) -> Any:
    """Return an answer's data as `model`.

    Raises:
        FabricUnavailable: It has another shape: what answers there is no gateway of ours.
    """
    try:
        return model.model_validate(data)
    except ValueError as exc:
        first = str(exc).splitlines()[0]
        raise FabricUnavailable(
            f"{what}: the answer cannot be read: {first}",
            hint="is that a gateway of this version? see: aenv hub status",
        ) from exc
