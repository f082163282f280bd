"""Shared data models: instances, their records, and results of calls."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray import ids
from aenv_ray.project.config import DeployChanges, NetworkMode
from aenv_ray.project.storage import StorageMount


class Frozen(BaseModel):
    """A record that is not changed."""

    model_config = ConfigDict(frozen=True)


# --- instances -----------------------------------------------------------------------------------


class ActorDensity(StrEnum):
    """Number of instances per host actor."""

    DEDICATED = "dedicated"
    """One; the actor has the instance's id and is listed by ``ray list actors``."""
    SHARED = "shared"
    """Many on one actor per node, for rollouts at scale."""


class Lifetime(StrEnum):
    """What ends an instance, besides TTL, idle timeout and release."""

    JOB = "job"
    """The end of the Ray job that created it."""
    DETACHED = "detached"
    """Nothing else."""


class InstanceStatus(StrEnum):
    """The state of an instance."""

    PENDING = "Pending"
    """Requested; its sandbox is not running yet."""
    RUNNING = "Running"
    """Its sandbox is running and answers calls."""
    FAILED = "Failed"
    """Its sandbox failed to start, or died."""
    TERMINATED = "Terminated"
    """It was released, or its deadline passed."""


class InstanceSpec(Frozen):
    """The request for an instance."""

    instance_id: ids.InstanceId
    reference: str
    """``name@version``, for display; `digest` identifies the code."""
    digest: str
    """Digest of the project's content."""
    ttl_s: float
    idle_timeout_s: float | None = None
    environment_variables: dict[str, str] = Field(default_factory=dict, repr=False)
    arguments: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    owner: str | None = None
    """The owner of the instance, whose quota it counts towards; free text."""
    datasource: str = ""
    engine: str = "process"
    engines: tuple[str, ...] = ()
    """Engines of which the host takes the first that it can run, instead of `engine`. Empty: the
    engine is fixed."""
    job_id: str | None = None
    """The Ray job that it ends with; None if detached."""
    changes: DeployChanges | None = None
    """Changes to the project's ``deployConfig``."""
    storage: StorageMount | None = None
    """Persistent storage to mount."""
    node_ids: tuple[str, ...] = ()
    """Ray nodes that it may run on; empty: any."""
    near_node: str = ""
    """Ray node that a shared host is chosen on, if it has room there; empty: none."""
    outer: tuple[str, ...] = ()
    """For an inner instance: the environments of the instances around it, the outermost first."""
    places: int = 1
    """How many instances it counts as, in quotas and in slots: itself and the inner instances that
    it may have. 0 for an inner instance: the outermost one includes it."""

    @property
    def possible_engines(self) -> tuple[str, ...]:
        """The engines that it may run on."""
        return self.engines or (self.engine,)


class Isolation(Frozen):
    """The actual isolation of a running sandbox from its node."""

    kind: str
    """``namespaces``, ``none``, ``container``, ``thread`` …"""
    namespaces: tuple[str, ...] = ()
    network: NetworkMode = NetworkMode.HOST
    allowed: tuple[str, ...] = ()
    """Destinations of network ``allowlist``; names with the addresses they resolved to."""
    read_only_host: bool = False
    seccomp: bool = False
    no_new_privileges: bool = False
    limits: dict[str, str] = Field(default_factory=dict)
    """Resource limits and how they are enforced, such as ``memory: 2 GiB per process (rlimit)``."""
    missing: tuple[str, ...] = ()
    """What is *not* isolated, each with the reason."""


class InstanceRecord(Frozen):
    """What a host needs to adopt an instance whose sandbox outlived its actor."""

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
    """In a warm pool, not handed out yet."""
    requested_id: ids.InstanceId | None = None
    """For an instance from a warm pool: the id that its creator requested."""
    inner: dict[str, ids.InstanceId] = Field(default_factory=dict)
    """The instances of other environments that its code calls, which end with it."""
    inner_places: dict[str, int] = Field(default_factory=dict)
    """How many inner instances each of these counts as: more than one if it may have inner
    instances, too."""
    has_ended: bool = False
    """Its sandbox has ended or is about to; the record remains until its inner instances have
    ended."""

    @property
    def id(self) -> ids.InstanceId:
        """The instance's id."""
        return self.spec.instance_id


class InstanceInfo(Frozen):
    """The current state of an instance."""

    id: ids.InstanceId
    requested_id: ids.InstanceId | None = None
    """For an instance from a warm pool: the id that its creator requested; calls accept it too."""
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
    """When its TTL ends, in seconds since the epoch."""
    idle_timeout_s: float | None
    lifetime: Lifetime
    owner: str | None
    labels: dict[str, str]
    isolation: Isolation
    start_mode: str
    """``template``: forked from a process with the code loaded; ``bare: …``: code loaded after the
    fork, with the reason; ``container: …`` or ``pod: …``. Prefixed with ``warm, `` from a pool."""
    calls: int
    """Number of calls answered."""
    generation: int
    """How often a restarted host actor adopted the instance."""
    places: int = 1
    """As `InstanceSpec.places`."""


# --- results -------------------------------------------------------------------------------------


class ResourceContents(Frozen):
    """One part of what a resource contains."""

    uri: str
    mime_type: str
    content: str | bytes
    """Text, or the bytes of a binary resource."""

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> ResourceContents:
        """Build from an MCP ``TextResourceContents`` or ``BlobResourceContents`` object."""
        content = data["text"] if "text" in data else base64.b64decode(data["blob"])
        return cls(uri=data["uri"], mime_type=data.get("mimeType") or "", content=content)


class PromptMessages(Frozen):
    """A prompt, filled in."""

    description: str
    messages: list[dict[str, Any]]
    """MCP messages: ``role``, and ``content`` with one content block."""

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> PromptMessages:
        """Build from an MCP ``GetPromptResult`` object."""
        return cls(description=data.get("description") or "", messages=data["messages"])


@dataclass(frozen=True)
class LogMessage:
    """What a tool logged while it ran."""

    level: str
    """``debug``, ``info``, ``notice``, ``warning``, ``error``, ``critical``, ``alert`` or
    ``emergency``."""
    text: str
    data: Any = None
    """JSON data that came with it."""


@dataclass(frozen=True)
class Question:
    """What a tool asks its caller while it runs, and waits for."""

    id: str
    """For the answer."""
    method: str
    """``elicitation/create``: of the caller's user; ``sampling/createMessage``: of its model."""
    params: Mapping[str, Any]
    """As in MCP: ``message`` and ``requestedSchema``, or ``messages`` and ``maxTokens``."""


class ToolResult:
    """The result of a tool call.

    Attributes:
        content: MCP content blocks, for example ``{"type": "text", "text": "…"}``.
        structured: The returned JSON object; None if there is none. A value that is not an object
            is under the key ``result``, as in MCP.
        is_error: The tool raised; `text()` has the message.
        meta: MCP ``_meta``, for example ``aenv/truncated`` if output was truncated.
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

    __hash__ = None  # type: ignore[assignment]  # its content is mutable

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
        """The tool's return value as JSON data, or else its text."""
        if self.structured is not None:
            return self.structured["result"] if self.meta.get("aenv/wrapped") else self.structured
        text = self.text()
        try:
            return json.loads(text)
        except ValueError:
            return text


class ExecResult(Frozen):
    """The result of a command in the sandbox, also of a failing or missing program."""

    exit_code: int
    """The command's exit code; 127 if it does not exist, 128 + signal if a signal killed it."""
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    """Whether output beyond the limit was cut."""
    duration_s: float = 0.0

    def text(self) -> str:
        """Return stdout as text; invalid UTF-8 becomes U+FFFD."""
        return self.stdout.decode(errors="replace")


class ResetResult(Frozen):
    """What a reset found."""

    clean: bool
    """Whether nothing of earlier episodes is left. Otherwise the instance cannot be used."""
    reasons: tuple[str, ...] = ()
    """What is left, in words."""
    replaced: bool = False
    """Whether the caller's `Environment` has a new instance instead."""


class TaskPage(Frozen):
    """Some of the tasks that an environment brings."""

    tasks: tuple[dict[str, Any], ...]
    next_offset: int | None
    """Where the next page begins; None after the last task."""


class FileEntry(Frozen):
    """An entry of a directory in the sandbox."""

    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    modified_at: float
    """Seconds since the epoch."""
