"""A project's ``config.json``: AEnvironment's fields and ours; unknown ones are kept."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from aenv_ray import ids, units
from aenv_ray.errors import ConfigError
from aenv_ray.project import destinations
from aenv_ray.project import process_strings as texts


class _ProjectSection(BaseModel):
    """Part of a project's ``config.json``: unknown fields are kept, for other tools read it too."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class NetworkMode(StrEnum):
    """What a sandbox may reach."""

    NONE = "none"
    """Nothing but its own loopback."""
    HOST = "host"
    """Whatever the node reaches, Ray included: invariant 7 does not hold."""
    INTERNET = "internet"
    """The internet, not the node, not private addresses."""
    ALLOWLIST = "allowlist"
    """What ``deployConfig.allow`` names, and nothing else."""


class ServiceConfig(_ProjectSection):
    """``deployConfig.service``: how the environment runs as a service."""

    replicas: int = Field(default=1, ge=0)
    port: int = Field(default=8081, ge=1, le=65535)
    enable_storage: bool = Field(default=False, alias="enableStorage")
    storage_size: str = Field(default="10Gi", alias="storageSize")
    storage_name: str | None = Field(default=None, alias="storageName")
    mount_path: str = Field(default="/home/admin/data", alias="mountPath")


class ContainerConfig(_ProjectSection):
    """``deployConfig.container``: what an instance gets where it is a container.

    Nobody else reads it: an unknown field is a mistake, which might loosen what was to be tight.
    """

    image: str | None = None
    """Image to run in. None: the ``image`` artifact, else ``AENV_DOCKER_IMAGE``."""
    user: str | None = None
    """``"root"``, ``"1000:1000"`` … None: the image's own user, nobody where it names none."""
    runtime: str | None = None
    """OCI runtime, for example ``crun``. None: ``AENV_DOCKER_RUNTIME``, else the daemon's."""
    cap_add: tuple[str, ...] = Field(default=(), alias="capAdd")
    """Capabilities; without any it has none."""
    pids: int = Field(default=1024, ge=16)
    """Processes and threads at once."""
    read_only_root: bool = Field(default=False, alias="readOnlyRoot")
    """Only the work directory and ``/tmp`` can be written to."""
    door: Literal["runtime", "public", "commands"] | None = None
    """Who answers calls: our runtime with the project's code, the image's own server on port 8081,
    or our runtime without code. None: by what the image and the project have."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        fields = cls.model_fields.items()
        known = {name for key, field in fields for name in (key, field.alias) if name}
        unknown = sorted(data.keys() - known) if isinstance(data, dict) else []
        if unknown:
            raise ConfigError(
                f"deployConfig.container has no {', '.join(map(repr, unknown))}",
                hint=f"it has {', '.join(field.alias or key for key, field in fields)}",
            )
        return data


class DeployConfig(_ProjectSection):
    """``deployConfig``: what an instance gets."""

    cpu: str | float | None = None
    """Cores: ``2``, ``"2C"``, ``"500m"``. None means no limit."""
    memory: str | int | None = None
    """``"4G"`` or ``"4Gi"``. None means no limit."""
    ephemeral_storage: str | int | None = Field(default=None, alias="ephemeralStorage")
    """Size of the private work directory, and of what is written to a container's image."""
    os: str | None = None
    """``"linux"`` …: refused where sandboxes run on another one. None: any."""
    ttl: str | float | None = None
    """Default TTL of instances; an explicit ``ttl`` argument wins."""
    idle_timeout: str | float | None = Field(default=None, alias="idleTimeout")
    """An instance that nobody calls for this long ends. None means never."""
    network: NetworkMode | None = None
    """None (an old project): `NetworkMode.HOST`, with a notice."""
    allow: tuple[str, ...] | None = None
    """What network ``allowlist`` reaches: ``"pypi.org:443"``, ``"10.1.0.0/16"`` …"""
    engine: str | None = None
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    """Ports of servers inside an instance that the gateway passes HTTP and WebSockets to."""
    warm: int | None = Field(default=None, ge=0, le=4096)
    """Sandboxes that each shared host which runs it keeps ready. None: by recent demand."""
    hide_source: bool = Field(default=False, alias="hideSource")
    """Hide the project's own files from its instances, where solutions and graders lie in them."""
    environment_variables: dict[str, str] = Field({}, alias="environmentVariables")
    env: dict[str, str] = Field(default_factory=dict)
    """Older spelling of ``environmentVariables``; that one wins."""
    image_prefix: str | None = Field(default=None, alias="imagePrefix")
    pod_template: str | None = Field(default=None, alias="podTemplate")
    container: ContainerConfig = Field(default_factory=ContainerConfig)
    service: ServiceConfig = Field(default_factory=ServiceConfig)

    @model_validator(mode="before")
    @classmethod
    def _name_the_allow_lists_network(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("allow") is not None and not data.get("network"):
            return {**data, "network": NetworkMode.ALLOWLIST}
        return data

    @model_validator(mode="after")
    def _check_network(self) -> Self:
        is_listed = self.network is NetworkMode.ALLOWLIST
        if self.allow is not None and not is_listed:
            raise ConfigError(
                f'deployConfig.allow does not go with deployConfig.network "{self.network}"',
                hint='leave out the network, or set it to "allowlist"',
            )
        if is_listed and not self.allow:
            raise ConfigError(
                'deployConfig.allow names nothing for deployConfig.network "allowlist" to reach',
                hint='name something, or set the network to "none"',
            )
        return self

    @field_validator("allow")
    @classmethod
    def _check_allow(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for number, entry in enumerate(value or ()):
            destinations.parse_destination(entry, what=f"deployConfig.allow[{number}]")
        return value

    @field_validator("cpu")
    @classmethod
    def _check_cpu(cls, value: str | float | None) -> str | float | None:
        if value is None or value == "":
            return None
        units.parse_cpu_cores(value)
        return value

    @field_validator("memory", "ephemeral_storage")
    @classmethod
    def _check_memory(cls, value: str | int | None) -> str | int | None:
        if value is None or value == "":
            return None
        units.parse_memory_bytes(value)
        return value

    @field_validator("ttl", "idle_timeout")
    @classmethod
    def _check_duration(cls, value: str | float | None) -> str | float | None:
        if value is None or value == "":
            return None
        units.parse_duration_s(value)
        return value

    @field_validator("environment_variables", "env")
    @classmethod
    def _check_variables(cls, value: dict[str, str], info: Any) -> dict[str, str]:
        field = "env" if info.field_name == "env" else "environmentVariables"
        return texts.checked_variables(value, what=f"deployConfig.{field}")

    @property
    def is_dual(self) -> bool:
        """Whether it asks for a second container."""
        return (self.pod_template or "").lower() == "dualcontainer"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of every instance, both spellings merged."""
        return {**self.env, **self.environment_variables}


class TestConfig(_ProjectSection):
    """``testConfig``: how ``aenv test`` checks the project."""

    __test__ = False  # not a test class, whatever its name suggests to pytest

    script: str = ""
    """Shell command, run in the project directory."""


class BuildConfig(_ProjectSection):
    """``buildConfig``: how the image is built."""

    dockerfile: str = "./Dockerfile"
    context: str = "."
    image_name: str | None = None
    image_tag: str | None = None
    platform: str | None = None
    build_args: dict[str, str] = Field(default_factory=dict)


class Artifact(_ProjectSection):
    """One build product, for example an image reference."""

    id: str = ""
    type: str
    content: str
    digest: str = ""
    """Which content exactly: of an image, its id, or the repository and digest that was pushed."""


class EnvironmentConfig(_ProjectSection):
    """A project's ``config.json``."""

    name: str
    version: str = "1.0.0"
    description: str = ""
    tags: tuple[str, ...] = ()
    status: str = "Ready"
    code_url: str = Field(default="", alias="codeUrl")
    artifacts: tuple[Artifact, ...] = ()
    build: BuildConfig = Field(default_factory=BuildConfig, alias="buildConfig")
    test: TestConfig = Field(default_factory=TestConfig, alias="testConfig")
    deploy: DeployConfig = Field(default_factory=DeployConfig, alias="deployConfig")

    @field_validator("name", "version")
    @classmethod
    def _check_reference(cls, value: str, info: Any) -> str:
        ids.split_reference(value if info.field_name == "name" else f"x@{value}")
        return value

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


class DeployChanges(BaseModel):
    """What a caller wants otherwise than ``deployConfig`` has it, for instances of his own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str | None = None
    """As ``deployConfig.cpu``, like the next two."""
    memory: str | None = None
    ephemeral_storage: str | None = None
    image: str | None = None
    """Instead of the project's, where an instance is a container."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """One more port of a server inside that the gateway passes HTTP and WebSockets to."""

    @field_validator("cpu")
    @classmethod
    def _check_cpu(cls, value: str | None) -> str | None:
        if value is not None:
            units.parse_cpu_cores(value)
        return value

    @field_validator("memory", "ephemeral_storage")
    @classmethod
    def _check_size(cls, value: str | None, info: Any) -> str | None:
        if value is not None:
            units.parse_memory_bytes(value, what=info.field_name.replace("_", " "))
        return value

    @field_validator("image")
    @classmethod
    def _check_image(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or not value.isprintable()):
            raise ConfigError(f"image {value[:80]!r} is no image's name")
        return value

    def made_to(self, config: EnvironmentConfig) -> EnvironmentConfig:
        """Return a project's configuration with these changes."""
        own = self.model_dump(include={"cpu", "memory", "ephemeral_storage"}, exclude_none=True)
        deploy = config.deploy
        if self.port is not None:
            own["ports"] = tuple(dict.fromkeys((*deploy.ports, self.port)))
        if self.image is not None:
            own["container"] = deploy.container.model_copy(update={"image": self.image})
        return config.model_copy(update={"deploy": deploy.model_copy(update=own)})
