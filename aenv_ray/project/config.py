"""A project's ``config.json``: AEnvironment's fields and ours; unknown fields are kept."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from aenv_ray import ids, units
from aenv_ray.errors import ConfigError
from aenv_ray.project import destinations, process_strings

MAX_INNER_INSTANCES: Final = 16


class _ProjectSection(BaseModel):
    """A section of ``config.json``; unknown fields are kept for other tools."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class NetworkMode(StrEnum):
    """The network access of a sandbox."""

    NONE = "none"
    """Only its own loopback."""
    HOST = "host"
    """Everything that the node reaches, including Ray: invariant 7 does not hold."""
    INTERNET = "internet"
    """The internet, without the node and private addresses."""
    ALLOWLIST = "allowlist"
    """Only the destinations in ``deployConfig.allow``."""


class ServiceConfig(_ProjectSection):
    """``deployConfig.service``: how the environment runs as a service."""

    replicas: int = Field(default=1, ge=0)
    port: int = Field(default=8081, ge=1, le=65535)
    enable_storage: bool = Field(default=False, alias="enableStorage")
    storage_size: str = Field(default="10Gi", alias="storageSize")
    storage_name: str | None = Field(default=None, alias="storageName")
    mount_path: str = Field(default="/home/admin/data", alias="mountPath")


class ContainerConfig(_ProjectSection):
    """``deployConfig.container``: options for instances that are containers.

    An unknown field is an error here: a misspelled option could weaken the isolation.
    """

    image: str | None = None
    """Container image. None: the ``image`` artifact, else ``AENV_DOCKER_IMAGE``."""
    user: str | None = None
    """``"root"``, ``"1000:1000"`` … None: the image's user, or nobody if it has none."""
    runtime: str | None = None
    """OCI runtime, for example ``crun``. None: ``AENV_DOCKER_RUNTIME``, else the daemon's."""
    cap_add: tuple[str, ...] = Field(default=(), alias="capAdd")
    """Linux capabilities; none by default."""
    sidecar_cap_add: tuple[str, ...] = Field(default=(), alias="sidecarCapAdd")
    """Linux capabilities of the sidecar; `cap_add` does not apply to it."""
    pids: int = Field(default=1024, ge=16)
    """Maximum number of processes and threads."""
    read_only_root: bool = Field(default=False, alias="readOnlyRoot")
    """Only the work directory and ``/tmp`` are writable."""
    door: Literal["runtime", "public", "commands"] | None = None
    """What answers calls: ``runtime`` (our runtime with the project's code), ``public`` (the
    image's own server on port 8081) or ``commands`` (our runtime without code). None: chosen by the
    content of image and project."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        fields = cls.model_fields.items()
        known = {name for key, field in fields for name in (key, field.alias) if name}
        unknown = sorted(data.keys() - known) if isinstance(data, dict) else []
        if unknown:
            raise ConfigError(
                f"deployConfig.container has unknown fields: {', '.join(map(repr, unknown))}",
                hint=f"known fields: {', '.join(field.alias or key for key, field in fields)}",
            )
        return data


class DeployConfig(_ProjectSection):
    """``deployConfig``: resources and options of instances."""

    cpu: str | float | None = None
    """Cores: ``2``, ``"2C"``, ``"500m"``. None: no limit."""
    memory: str | int | None = None
    """``"4G"`` or ``"4Gi"``. None: no limit; with the process engine, half of the node's memory."""
    ephemeral_storage: str | int | None = Field(default=None, alias="ephemeralStorage")
    """Size limit of the work directory and of a container's writable layer."""
    os: str | None = None
    """``"linux"`` …: refused on other operating systems. None: any."""
    ttl: str | float | None = None
    """Default TTL of instances; an explicit ``ttl`` argument wins."""
    idle_timeout: str | float | None = Field(default=None, alias="idleTimeout")
    """An instance without calls for this long ends. None: never."""
    network: NetworkMode | None = None
    """None (an old project): `NetworkMode.HOST`, with a notice."""
    allow: tuple[str, ...] | None = None
    """Destinations of network ``allowlist``: ``"pypi.org:443"``, ``"10.1.0.0/16"`` …"""
    engine: str | None = None
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    """Ports inside an instance that the gateway forwards HTTP and WebSockets to."""
    warm: int | None = Field(default=None, ge=0, le=4096)
    """Warm sandboxes per shared host that runs the environment. None: by recent demand."""
    hide_source: bool = Field(default=False, alias="hideSource")
    """Hide the project's files, such as solutions and graders, from its instances."""
    environment_variables: dict[str, str] = Field({}, alias="environmentVariables")
    env: dict[str, str] = Field(default_factory=dict)
    """Older name of ``environmentVariables``, which wins."""
    chat_model: bool = Field(default=False, alias="chatModel")
    """Whether the code asks the operator's chat model, as `aenv_ray.runtime.chat_model`."""
    environments: tuple[str, ...] = ()
    """Environments that the code calls, ``name`` or ``name@version``."""
    inner_instances: Annotated[int | None, Field(ge=1, le=MAX_INNER_INSTANCES)] = Field(
        default=None, alias="innerInstances"
    )
    """Instances of these that one instance may have at once. None: one of each."""
    image_prefix: str | None = Field(default=None, alias="imagePrefix")
    instance_id_image: str = Field(default="", alias="instanceIdImage")
    """Image of a sidecar whose datasource is an instance id of SWE-bench's form. ``{id}`` stands
    for it, in the spelling of SWE-bench's images."""
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
                f'deployConfig.allow cannot be combined with deployConfig.network "{self.network}"',
                hint='remove the network, or set it to "allowlist"',
            )
        if is_listed and not self.allow:
            raise ConfigError(
                'deployConfig.network "allowlist" requires entries in deployConfig.allow',
                hint='add destinations, or set the network to "none"',
            )
        return self

    @field_validator("instance_id_image")
    @classmethod
    def _check_instance_id_image(cls, value: str) -> str:
        if value and "{id}" not in value:
            raise ConfigError(
                f"invalid deployConfig.instanceIdImage {value[:80]!r}: it does not contain {{id}}",
                hint='write it as "docker.io/swebench/sweb.eval.x86_64.{id}:latest"',
            )
        return value

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

    @field_validator("environments")
    @classmethod
    def _check_environments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for reference in value:
            ids.split_reference(reference)
        return value

    @model_validator(mode="after")
    def _check_inner_instances(self) -> Self:
        if self.inner_instances is not None and not self.environments:
            raise ConfigError(
                "deployConfig.innerInstances requires entries in deployConfig.environments",
                hint="name the environments that the code calls, or remove innerInstances",
            )
        return self

    @field_validator("environment_variables", "env")
    @classmethod
    def _check_variables(cls, value: dict[str, str], info: Any) -> dict[str, str]:
        field = "env" if info.field_name == "env" else "environmentVariables"
        return process_strings.checked_variables(value, what=f"deployConfig.{field}")

    @property
    def is_dual(self) -> bool:
        """Whether instances have a second container."""
        return (self.pod_template or "").lower() == "dualcontainer"

    @property
    def inner_limit(self) -> int:
        """How many inner instances one instance may have at once, theirs included."""
        if self.inner_instances is not None:
            return self.inner_instances
        return min(len(self.environments), MAX_INNER_INSTANCES)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of instances, with both names of the field merged."""
        return {**self.env, **self.environment_variables}


class TestConfig(_ProjectSection):
    """``testConfig``: how ``aenv test`` tests the project."""

    __test__ = False  # pytest would collect it

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
    """For an image, its id, or the pushed repository and digest."""


class EnvironmentConfig(_ProjectSection):
    """A project's ``config.json``."""

    name: str
    version: str = "1.0.0"
    description: str = ""
    tags: tuple[str, ...] = ()
    status: str = "Ready"
    requires_python: str = Field(default="", alias="requiresPython")
    """Versions of Python that the code runs in: ``">=3.12,<3.14"``. Empty: any."""
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

    @field_validator("requires_python")
    @classmethod
    def _check_python(cls, value: str) -> str:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet  # few projects need it

        try:
            return str(SpecifierSet(value)) and value
        except InvalidSpecifier:
            raise ConfigError(
                f"invalid requiresPython {value[:80]!r}",
                hint='write versions as packages do, for example ">=3.12,<3.14"',
            ) from None

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


class DeployChanges(BaseModel):
    """Changes to ``deployConfig`` that a caller makes for their instances."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str | None = None
    """As ``deployConfig.cpu``; likewise the next two."""
    memory: str | None = None
    ephemeral_storage: str | None = None
    image: str | None = None
    """Container image instead of the project's."""
    network: Literal["none"] | None = None
    """``none``: no network, even if the project has one."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """One more port that the gateway forwards HTTP and WebSockets to."""

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
            raise ConfigError(
                f"invalid image name {value[:80]!r}", hint="write it as [REGISTRY/]NAME[:TAG]"
            )
        return value

    def made_to(self, config: EnvironmentConfig) -> EnvironmentConfig:
        """Return a project's configuration with these changes."""
        own = self.model_dump(include={"cpu", "memory", "ephemeral_storage"}, exclude_none=True)
        deploy = config.deploy
        if self.port is not None:
            own["ports"] = tuple(dict.fromkeys((*deploy.ports, self.port)))
        if self.network is not None:
            own |= {"network": NetworkMode.NONE, "allow": None}
        if self.image is not None:
            own["container"] = deploy.container.model_copy(update={"image": self.image})
        return config.model_copy(update={"deploy": deploy.model_copy(update=own)})
