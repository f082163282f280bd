"""The shapes that cross a boundary: an instance, its record, a result of a call."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray import ids
from aenv_ray.project.config import DeployChanges, NetworkMode
from aenv_ray.project.storage import StorageMount


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


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
    changes: DeployChanges | None = None
    """What it has otherwise than its project says."""
    storage: StorageMount | None = None
    """What of it outlives it."""
    node_ids: tuple[str, ...] = ()
    """Ray nodes that it may be on; none: any."""


class Isolation(_Frozen):
    """What really separates a sandbox from its node: facts of the running instance, not wishes."""

    kind: str
    """``namespaces``, ``none``, ``container``, ``thread`` …"""
    namespaces: tuple[str, ...] = ()
    network: NetworkMode = NetworkMode.HOST
    allowed: tuple[str, ...] = ()
    """What network ``allowlist`` reaches: each entry, a name with the addresses that it had."""
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
    requested_id: ids.InstanceId | None = None
    """Of one from a pool: the id that its creator asked for; calls find it by that as well."""
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
