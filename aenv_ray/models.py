"""The shapes that cross a boundary: a project's config, an instance, a result of a call."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from aenv_ray import ids, texts, units


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class _ProjectSection(BaseModel):
    """Part of a project's ``config.json``: unknown fields are kept, for other tools read it too."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


# --- config.json ---------------------------------------------------------------------------------


class NetworkMode(StrEnum):
    """What a sandbox may reach."""

    NONE = "none"
    """Nothing but its own loopback."""
    HOST = "host"
    """Whatever the node reaches, Ray included: invariant 7 does not hold."""
    INTERNET = "internet"
    """The internet, not the node, not private addresses."""


class ServiceConfig(_ProjectSection):
    """``deployConfig.service``: how the environment runs as a service."""

    replicas: int = Field(default=1, ge=0)
    port: int = Field(default=8081, ge=1, le=65535)
    enable_storage: bool = Field(default=False, alias="enableStorage")
    storage_size: str = Field(default="10Gi", alias="storageSize")
    storage_name: str | None = Field(default=None, alias="storageName")
    mount_path: str = Field(default="/home/admin/data", alias="mountPath")


class ContainerConfig(_ProjectSection):
    """``deployConfig.container``: what an instance gets where it is a container."""

    image: str | None = None
    """Image to run in. None: the ``image`` artifact, else ``AENV_DOCKER_IMAGE``."""
    user: str | None = None
    """``"root"``, ``"1000:1000"`` … None: the image's own user, nobody where it names none."""
    runtime: str | None = None
    """OCI runtime, for example ``runsc``. None: ``AENV_DOCKER_RUNTIME``, else the daemon's."""
    cap_add: tuple[str, ...] = Field(default=(), alias="capAdd")
    """Capabilities; without any it has none."""
    pids: int = Field(default=1024, ge=16)
    """Processes and threads at once."""
    read_only_root: bool = Field(default=False, alias="readOnlyRoot")
    """Only the work directory and ``/tmp`` can be written to."""
    door: Literal["runtime", "public", "commands"] | None = None
    """Who answers calls: our runtime with the project's code, the image's own server on port 8081,
    or our runtime without code. None: by what the image and the project have."""


class DeployConfig(_ProjectSection):
    """``deployConfig``: what an instance gets."""

    cpu: str | float | None = None
    """Cores: ``2``, ``"2C"``, ``"500m"``. None means no limit."""
    memory: str | int | None = None
    """``"4G"`` or ``"4Gi"``. None means no limit."""
    ephemeral_storage: str | int | None = Field(default=None, alias="ephemeralStorage")
    """Size of the private work directory."""
    os: str = "linux"
    ttl: str | float | None = None
    """Default TTL of instances; an explicit ``ttl`` argument wins."""
    idle_timeout: str | float | None = Field(default=None, alias="idleTimeout")
    """An instance that nobody calls for this long ends. None means never."""
    network: NetworkMode | None = None
    """None (an old project): `NetworkMode.HOST`, with a notice."""
    engine: str | None = None
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


# --- instances -----------------------------------------------------------------------------------


class ActorDensity(StrEnum):
    """How many instances a host actor holds (design D2)."""

    DEDICATED = "dedicated"
    """One; the actor carries the instance's id and shows in ``ray list actors``."""
    SHARED = "shared"
    """Many on one actor of the node: for rollouts at scale."""


class Lifetime(StrEnum):
    """What an instance's life is bound to, besides its TTL."""

    JOB = "job"
    """Ends with the Ray job that made it."""
    DETACHED = "detached"
    """Only TTL, idle timeout and release end it."""


class InstanceStatus(StrEnum):
    """Where an instance is in its life."""

    PENDING = "Pending"
    """Asked for; its sandbox does not run yet."""
    RUNNING = "Running"
    """Its sandbox runs and answers calls."""
    FAILED = "Failed"
    """Its sandbox did not start, or died."""
    TERMINATED = "Terminated"
    """It was released or its deadline passed."""


class InstanceSpec(_Frozen):
    """What a caller asks for when it creates an instance."""

    instance_id: ids.InstanceId
    reference: str
    """``name@version``, for people; the code is `digest`."""
    digest: str
    """Content digest of the project."""
    ttl_s: float
    idle_timeout_s: float | None = None
    environment_variables: dict[str, str] = Field(default_factory=dict, repr=False)
    arguments: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    owner: str | None = None
    """Whom the instance is accounted to; free text."""
    datasource: str = ""
    engine: str = "process"
    job_id: str | None = None
    """Ray job it ends with; None when detached."""


class Isolation(_Frozen):
    """What really separates a sandbox from its node: facts of the running instance, not wishes."""

    kind: str
    """``namespaces``, ``none``, ``container``, ``thread`` …"""
    namespaces: tuple[str, ...] = ()
    network: NetworkMode = NetworkMode.HOST
    read_only_host: bool = False
    seccomp: bool = False
    no_new_privileges: bool = False
    limits: dict[str, str] = Field(default_factory=dict)
    """What is limited and by which means, for example ``memory: 2 GiB per process (rlimit)``."""
    missing: tuple[str, ...] = ()
    """What is *not* isolated here, each in words with the reason."""


class InstanceRecord(_Frozen):
    """What a host must know to take over an instance whose sandbox outlived its actor."""

    spec: InstanceSpec
    host_id: ids.HostId
    node_id: str
    density: ActorDensity
    created_at: float
    deadline: float
    """Seconds since the epoch, like `created_at`."""
    isolation: Isolation
    start_mode: str
    generation: int = 0
    is_pooled: bool = False
    """Nobody has it yet."""
    requested_id: ids.InstanceId | None = None
    """Of one from a pool: the id that its creator asked for."""

    @property
    def id(self) -> ids.InstanceId:
        """The instance's id."""
        return self.spec.instance_id


class InstanceInfo(_Frozen):
    """What is known of an instance now."""

    id: ids.InstanceId
    reference: str
    status: InstanceStatus
    engine: str
    node_id: str
    host: str
    """Name of the host actor."""
    density: ActorDensity
    created_at: float
    """Seconds since the epoch."""
    deadline: float
    """When the TTL ends it; seconds since the epoch."""
    idle_timeout_s: float | None
    lifetime: Lifetime
    owner: str | None
    labels: dict[str, str]
    isolation: Isolation
    start_mode: str
    """``template``: forked from a process that has the code loaded; ``bare``: loaded after the
    fork, with the reason; ``fresh``: a new process; after ``warm, `` when it was in a pool."""
    calls: int
    """Calls answered so far."""
    generation: int
    """How often the host actor was restarted and adopted the instance again."""


# --- results -------------------------------------------------------------------------------------


class ToolResult:
    """What a tool call returned.

    Attributes:
        content: MCP content blocks, for example ``{"type": "text", "text": "…"}``.
        structured: The returned JSON object, None when the tool returned none. A tool that returns
            something else than an object has it under the key ``result``, as in MCP.
        is_error: The tool's own code raised; `text()` then says what.
        meta: MCP ``_meta``: ``aenv/truncated`` when output was cut, and the like.
    """

    __slots__ = ("content", "is_error", "meta", "structured")

    def __init__(
        self,
        content: list[dict[str, Any]],
        structured: dict[str, Any] | None = None,
        is_error: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.content = content
        self.structured = structured
        self.is_error = is_error
        self.meta = meta or {}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> ToolResult:
        """Build from an MCP ``CallToolResult`` object."""
        return cls(
            data.get("content") or [],
            data.get("structuredContent"),
            bool(data.get("isError")),
            data.get("_meta"),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (ToolResult, (self.content, self.structured, self.is_error, self.meta or None))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolResult):
            return NotImplemented
        return bool(self.__reduce__()[1] == other.__reduce__()[1])

    __hash__ = None  # type: ignore[assignment]  # it holds mutable content

    def __repr__(self) -> str:
        return (
            f"ToolResult(content={self.content!r}, structured={self.structured!r}, "
            f"is_error={self.is_error})"
        )

    def text(self) -> str:
        """Return the text blocks, joined by newlines."""
        return "\n".join(b.get("text", "") for b in self.content if b.get("type") == "text")

    @property
    def data(self) -> Any:
        """What the tool returned, as JSON data: the object, the value, or else the text."""
        if self.structured is not None:
            return self.structured["result"] if self.meta.get("aenv/wrapped") else self.structured
        text = self.text()
        try:
            return json.loads(text)
        except ValueError:
            return text


class ExecResult(_Frozen):
    """A command that ran in the sandbox to its end. A failing or missing program is a result."""

    exit_code: int
    """The command's own; 127 when it does not exist, 128 + signal when a signal ended it."""
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    """Output beyond the limit was cut."""
    duration_s: float = 0.0

    def text(self) -> str:
        """Return stdout as text; bytes that are no UTF-8 become U+FFFD."""
        return self.stdout.decode(errors="replace")


class FileEntry(_Frozen):
    """One entry of a directory in the sandbox."""

    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    modified_at: float
    """Seconds since the epoch."""
