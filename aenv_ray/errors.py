"""The errors that aenv-ray raises, as one tree, and their wire format.

    AenvError                        code, http_status, retryable (class facts); hint (instance)
    ├─ ConfigError                   wrong settings, arguments or project files                400
    │  ├─ ArtifactTooLarge           a file exceeds the limit of the artifact store            413
    │  ├─ ArtifactQuotaExceeded      an owner's artifacts exceed their quota                   413
    │  ├─ BackupInvalid              not a backup, damaged, or of another version              400
    │  └─ PolicyRefused              the operator's policy does not allow it                   403
    ├─ EnvironmentNotFound           no such environment                                       404
    ├─ ServiceNotFound               no such service                                           404
    ├─ ArtifactNotFound              the artifact store does not have the file                 404
    ├─ ArtifactDamaged               the content does not match its digest                     422
    ├─ ArtifactStoreDenied           the artifact store refuses our credentials                502
    ├─ ArtifactStoreFull             the artifact store is full                                507
    ├─ CatalogConflict               the state of the catalog does not allow it                409
    │  ├─ VersionConflict            the version is published with other content
    │  └─ EnvironmentInUse           instances or services use it
    ├─ Unauthorized                  no valid token                                            401
    ├─ Forbidden                     the token may not do this                                 403
    ├─ CapacityExceeded              no capacity now; has retry_after_s          retryable     429
    │  ├─ QuotaExceeded              quota of an owner or label reached          retryable     429
    │  │  └─ QuotaTooSmall           more requested at once than the quota allows              429
    │  └─ RateLimited                too many requests with one token           retryable     429
    ├─ InstanceError                 has instance_id
    │  ├─ InstanceNotFound           unknown id, or ended long ago                             404
    │  ├─ InstanceExpired            ended by TTL, idle timeout or end of its job              410
    │  ├─ InstanceReleased           it was released                                           410
    │  ├─ SandboxStartFailed         it could not be created, or its code does not load        502
    │  ├─ SandboxLost                the sandbox, its host or its node died: episode void      410
    │  │  ├─ SandboxDiedInside       something in it ended it: an outcome of the episode       410
    │  │  └─ SessionLost             a service's replica and its session state are lost        410
    │  ├─ CallOutcomeUnknown         the call may have run; its outcome is unknown             504
    │  ├─ ResetFailed                a reset left the instance unclean; create another         409
    │  ├─ FileAccessError            a path inside the sandbox cannot be read or written       400
    │  └─ PortUnreachable            nothing in the sandbox answers on the port                502
    ├─ ToolError                     has tool_name
    │  ├─ ToolNotFound                                                                         404
    │  ├─ ToolInputInvalid           arguments do not match the schema                         422
    │  ├─ ToolTimeout                (also TimeoutError) stopped at its deadline               504
    │  ├─ CallCancelled              the caller cancelled the call                             499
    │  ├─ CallerUnsupported          the tool asked for what its caller does not offer         501
    │  └─ FunctionFailed             a reward, function or health check raised                 500
    │     └─ SandboxExhausted        it raised because the sandbox reached one of its limits   500
    ├─ CircuitOpen                   too many infrastructure failures in a row   retryable     503
    ├─ FabricUnavailable             Ray or one of our services does not answer  retryable     503
    │  └─ ServiceUnavailable         an environment's service takes no calls     retryable     503
    ├─ EndpointUnavailable           a policy's model endpoint gives no answer   retryable     502
    ├─ ConversationRefused           a policy's model cannot answer one conversation           422
    ├─ DeadlineExceeded              (also TimeoutError) something did not happen in time      504
    └─ InternalError                 a bug in aenv-ray; please report it                       500

A tool that raises is a *result* with ``is_error``, never one of these errors. A dead sandbox is an
error, never a result: confusing the two would produce wrong rewards. A sandbox that was ended from
inside is the outcome of its episode (`SandboxDiedInside`), since an agent may do so on purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, ClassVar


class AenvError(Exception):
    """Base of all errors of aenv-ray.

    Ray pickles errors, so only the message is positional, all context is keyword-only with a
    default, and instance data has no class-level default, which Ray's derived exception class would
    return instead of the value.
    """

    code: ClassVar[str] = "aenv_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    way_out: ClassVar[str | None] = None
    """What a reader can do about any error of the class: the default `hint`."""

    def __init_subclass__(
        cls, *, code: str | None = None, http_status: int | None = None, **kwargs: Any
    ) -> None:
        """Set the class facts that differ from those of the base."""
        super().__init_subclass__(**kwargs)
        if code is not None:
            cls.code = code
        if http_status is not None:
            cls.http_status = http_status

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.way_out if hint is None else hint

    @property
    def message(self) -> str:
        """The message, without the hint."""
        return str(self.args[0]) if self.args else ""

    @property
    def message_and_hint(self) -> str:
        """The message, followed by the hint in parentheses."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(AenvError, code="config_error", http_status=400):
    """The caller's settings, arguments or project files are wrong; never retried."""


class ArtifactTooLarge(ConfigError, code="artifact_too_large", http_status=413):
    """A file exceeds the size limit of the artifact store."""


class ArtifactQuotaExceeded(ConfigError, code="artifact_quota_exceeded", http_status=413):
    """The artifacts of an owner exceed their quota; delete some first."""


class BackupInvalid(ConfigError, code="backup_invalid"):
    """A file is not a backup of a hub, is damaged or truncated, or another version wrote it."""


class PolicyRefused(ConfigError, code="policy_refused", http_status=403):
    """The operator's policy does not allow what an environment requests; the hint names it."""


class EnvironmentNotFound(AenvError, code="environment_not_found", http_status=404):
    """There is no environment with this name, version or path."""


class ServiceNotFound(AenvError, code="service_not_found", http_status=404):
    """There is no service with this name."""


class ArtifactNotFound(AenvError, code="artifact_not_found", http_status=404):
    """The artifact store has no file with this digest."""


class ArtifactDamaged(AenvError, code="artifact_damaged", http_status=422):
    """Content does not match its digest: it was damaged in transfer or in storage."""


class ArtifactStoreDenied(AenvError, code="artifact_store_denied", http_status=502):
    """The artifact store refuses our credentials, or its directory belongs to another user."""


class ArtifactStoreFull(AenvError, code="artifact_store_full", http_status=507):
    """The artifact store is full."""


class CatalogConflict(AenvError, code="catalog_conflict", http_status=409):
    """The state of the catalog does not allow the request, for example a change of status."""


class VersionConflict(CatalogConflict, code="version_conflict"):
    """The version is published with other content: publish a new version."""


class EnvironmentInUse(CatalogConflict, code="environment_in_use"):
    """Instances or services use the version."""


class Unauthorized(AenvError, code="unauthorized", http_status=401):
    """The request has no token, or one that is unknown, expired or revoked."""


class Forbidden(AenvError, code="forbidden", http_status=403):
    """The token does not allow this request."""


class CapacityExceeded(AenvError, code="capacity_exceeded", http_status=429):
    """There is no capacity now; try again after `retry_after_s`."""

    retryable: ClassVar[bool] = True

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class QuotaExceeded(CapacityExceeded, code="quota_exceeded"):
    """The quota of an owner or label is reached."""


class QuotaTooSmall(QuotaExceeded, code="quota_too_small"):
    """More instances are requested at once than the quota of an owner or label allows at all."""

    retryable = False


class RateLimited(CapacityExceeded, code="rate_limited"):
    """Too many requests with one token."""


class InstanceError(AenvError, code="instance_error"):
    """An operation on one instance failed."""

    def __init__(
        self, message: str, *, instance_id: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.instance_id = instance_id


class InstanceNotFound(InstanceError, code="instance_not_found", http_status=404):
    """There is no instance with this id."""


class InstanceExpired(InstanceError, code="instance_expired", http_status=410):
    """The instance's TTL or idle timeout passed, or its job ended."""


class InstanceReleased(InstanceError, code="instance_released", http_status=410):
    """The instance was released before or during the call."""


class SandboxStartFailed(InstanceError, code="sandbox_start_failed", http_status=502):
    """The sandbox could not be created, or the environment's code does not load in it."""


class SandboxLost(InstanceError, code="sandbox_lost", http_status=410):
    """The sandbox, its host or its node died; the episode is void, not failed."""


class InsideCause(StrEnum):
    """What inside a sandbox ended it, or made its reward fail."""

    EXIT = "exit"
    """Its main process exited."""
    SIGNAL = "signal"
    """A process in it killed its main process, or that crashed."""
    MEMORY = "memory"
    """It reached its own memory limit; not that the node had no memory left."""
    PROCESSES = "processes"
    """It reached its limit of processes, threads or open files, or of watches of open files."""
    DISK = "disk"
    """It reached its limit of disk space."""
    CONNECTION = "connection"
    """It closed its connection to the host, or sent invalid messages, while it ran."""
    ROOM = "room"
    """It asked for an inner instance for which the cluster had no room, and said that no tool had
    asked. Only the host notes this. It is an outcome of the episode if the agent has acted, which
    may have chosen the moment."""


class SandboxDiedInside(SandboxLost, code="sandbox_died_inside"):
    """Something inside the sandbox ended it; `died_of` says what.

    An agent can cause this, so it is an outcome of the episode and no infrastructure failure.
    """

    def __init__(
        self,
        message: str,
        *,
        died_of: InsideCause | None = None,
        instance_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, instance_id=instance_id, hint=hint)
        self.died_of = died_of


class SessionLost(SandboxLost, code="session_lost"):
    """The replica with a session's state is lost; the next call starts with new state.

    Raised once per session.
    """


class CallOutcomeUnknown(InstanceError, code="call_outcome_unknown", http_status=504):
    """The call may have run, and its outcome is unknown; it was not repeated."""


class ResetFailed(InstanceError, code="reset_failed", http_status=409):
    """A reset left the instance unclean, or failed: it cannot be used any more."""


class FileAccessError(InstanceError, code="file_access_error", http_status=400):
    """A path inside the sandbox cannot be read, written or listed."""


class PortUnreachable(InstanceError, code="port_unreachable", http_status=502):
    """Nothing in the sandbox answers on the port, or it closed the connection."""


class ToolError(AenvError, code="tool_error"):
    """A tool, reward or function call was refused or stopped.

    A tool whose own code raised is not an error: it is a `ToolResult` with ``is_error``.
    """

    def __init__(
        self, message: str, *, tool_name: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.tool_name = tool_name


class ToolNotFound(ToolError, code="tool_not_found", http_status=404):
    """The environment has no tool, reward or function with this name."""


class ToolInputInvalid(ToolError, code="tool_input_invalid", http_status=422):
    """The arguments do not match the tool's input schema; the tool did not run.

    `argument` is the one whose value does not fit, if nothing else is wrong. It is empty if others
    are wrong as well, missing or unknown, and None if this is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        tool_name: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, tool_name=tool_name, hint=hint)
        self.argument = argument


class ToolTimeout(ToolError, TimeoutError, code="tool_timeout", http_status=504):
    """The call was stopped at its deadline."""


class CallCancelled(ToolError, code="call_cancelled", http_status=499):
    """The caller cancelled the call, and the tool was stopped."""


class CallerUnsupported(ToolError, code="caller_unsupported", http_status=501):
    """A tool asked the caller's user or model, which the caller does not offer."""


class FunctionFailed(ToolError, code="function_failed", http_status=500):
    """A reward, function or health check raised, or returned an invalid value."""


class SandboxExhausted(FunctionFailed, code="sandbox_exhausted"):
    """A reward or function raised because the sandbox reached a limit; `died_of` says which.

    An agent can cause this, so it is an outcome of the episode.
    """

    def __init__(
        self,
        message: str,
        *,
        died_of: InsideCause | None = None,
        tool_name: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, tool_name=tool_name, hint=hint)
        self.died_of = died_of


class CircuitOpen(AenvError, code="circuit_open", http_status=503):
    """Calls are refused after repeated infrastructure failures, until a pause has passed."""

    retryable: ClassVar[bool] = True


class FabricUnavailable(AenvError, code="fabric_unavailable", http_status=503):
    """Ray, the controller, a node's launcher, the hub or the artifact store does not answer."""

    retryable: ClassVar[bool] = True
    way_out: ClassVar[str | None] = "try again; if it fails again, see `aenv status`"


class ServiceUnavailable(FabricUnavailable, code="service_unavailable", http_status=503):
    """A service takes no calls: it is not deployed, or none of its replicas is free in time."""


class EndpointUnavailable(AenvError, code="endpoint_unavailable", http_status=502):
    """A policy's model endpoint cannot be reached, fails, or answers nonsense; see the message.

    The episode says nothing about the model, and is void.
    """

    retryable: ClassVar[bool] = True


class ConversationRefused(AenvError, code="conversation_refused", http_status=422):
    """A policy's model fails at the conversation of an episode, but works.

    The conversation contains what tools have returned, which an agent can choose: an outcome.
    """


class DeadlineExceeded(AenvError, TimeoutError, code="deadline_exceeded", http_status=504):
    """Something did not happen in time; the message names it."""


class InternalError(AenvError, code="internal_error"):
    """A bug in aenv-ray; please report it with the message."""

    way_out: ClassVar[str | None] = "this is a bug: report it with the message and the log"


ERRORS: tuple[type[AenvError], ...] = (
    AenvError, ConfigError, ArtifactTooLarge, ArtifactQuotaExceeded, BackupInvalid, PolicyRefused,
    EnvironmentNotFound, ServiceNotFound,
    ArtifactNotFound, ArtifactDamaged, ArtifactStoreDenied, ArtifactStoreFull, CatalogConflict,
    VersionConflict, EnvironmentInUse, Unauthorized, Forbidden, CapacityExceeded, QuotaExceeded,
    QuotaTooSmall, RateLimited, InstanceError, InstanceNotFound, InstanceExpired, InstanceReleased,
    SandboxStartFailed, SandboxLost, SandboxDiedInside, SessionLost, CallOutcomeUnknown,
    ResetFailed, FileAccessError, PortUnreachable, ToolError, ToolNotFound, ToolInputInvalid,
    ToolTimeout, CallCancelled, CallerUnsupported, FunctionFailed, SandboxExhausted, CircuitOpen,
    FabricUnavailable, ServiceUnavailable,
    EndpointUnavailable, ConversationRefused, DeadlineExceeded, InternalError,
)  # fmt: skip
"""Listed explicitly, because Ray creates subclasses of our errors at run time."""

_BY_CODE = {error.code: error for error in ERRORS}

INFRASTRUCTURE: tuple[type[AenvError], ...] = (
    ArtifactNotFound, ArtifactDamaged, ArtifactStoreDenied, ArtifactStoreFull, CapacityExceeded,
    QuotaExceeded, RateLimited, InstanceExpired, InstanceReleased, InstanceNotFound,
    SandboxStartFailed, SandboxLost, SessionLost, CallOutcomeUnknown, CircuitOpen,
    FabricUnavailable, EndpointUnavailable, DeadlineExceeded, InternalError,
)  # fmt: skip
"""Errors that void an episode: they say nothing about the policy, so they never become a reward.

`SandboxDiedInside` is a `SandboxLost`, but an outcome: see `is_infrastructure`.
"""


def is_infrastructure(error: BaseException) -> bool:
    """Whether an error voids an episode, rather than being caused by what ran in the sandbox."""
    return isinstance(error, INFRASTRUCTURE) and not isinstance(error, SandboxDiedInside)


_OF_AGENTS = frozenset(
    {"tools/call", "aenv/call_tools", "resources/read", "prompts/get", "completion/complete"}
)
"""Calls that run code of an environment for an agent."""


def as_tool_error(error: AenvError) -> ToolError | SandboxDiedInside:
    """Return an error that a sandbox answered a call with as an outcome of this call.

    Its code may be that of any error, also of one that is only for the program that calls.
    """
    if isinstance(error, ToolError | SandboxDiedInside):
        return error
    return FunctionFailed(f"{error.code}: {error.message}", hint=error.hint)


def reported_by_sandbox(
    data: Mapping[str, Any], method: str, *, instance_id: str | None = None
) -> AenvError:
    """Return the error that a sandbox answered a call with.

    A sandbox cannot say that the infrastructure failed, since code of an agent may speak for it:
    such an error becomes `SandboxDiedInside`. Two are accepted: that a result is no longer known,
    which is treated as the agent's doing, and that too many ports are open, which no episode
    depends on. Nor can a tool say that the program that calls it is wrong: see `as_tool_error`.
    """
    texts = {key: _cut(str(data[key])) for key in _SAID if data.get(key) is not None}
    if texts.get("died_of") == InsideCause.ROOM:
        del texts["died_of"]
    error = from_wire(texts, instance_id=instance_id)
    if isinstance(error, CallOutcomeUnknown):
        return error
    if not is_infrastructure(error):
        is_of_agent = method in _OF_AGENTS and not isinstance(error, ResetFailed)
        return as_tool_error(error) if is_of_agent else error
    if isinstance(error, CapacityExceeded) and method == "aenv/port_open":
        return error
    return SandboxDiedInside(
        f"the sandbox cannot run the call: {error.message}",
        died_of=InsideCause.CONNECTION,
        instance_id=instance_id,
        hint=error.hint,
    )


_SAID = ("code", "message", "hint", "tool_name", "died_of", "argument")
"""The fields that are read from a sandbox's error: not an instance id, nor a time to wait."""
_MOST_CHARACTERS = 100_000
"""Maximum length of each text of a sandbox's error: records, which drivers and runners collect,
contain errors."""


def _cut(text: str) -> str:
    left_out = len(text) - _MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:_MOST_CHARACTERS]}\n[{left_out} characters cut]"


GONE = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)
"""Errors that mean that an instance has ended."""


def to_wire(error: AenvError) -> dict[str, Any]:
    """Return `error` as a JSON object: ``code``, ``message``, ``hint`` and further context."""
    context = {key: value for key, value in vars(error).items() if value is not None}
    return {"code": error.code, "message": error.message, **context}


def from_wire(data: Mapping[str, Any], *, instance_id: str | None = None) -> AenvError:
    """Return the error that `to_wire` or the runtime encoded.

    Args:
        data: ``code``, ``message`` and optional context. An unknown code becomes `InternalError`.
        instance_id: The id for instance errors that have none.
    """
    cls = _BY_CODE.get(str(data.get("code")), InternalError)
    context: dict[str, Any] = {"hint": data.get("hint")}
    if issubclass(cls, InstanceError):
        context["instance_id"] = data.get("instance_id") or instance_id
    elif issubclass(cls, ToolError):
        context["tool_name"] = data.get("tool_name")
    elif issubclass(cls, CapacityExceeded):
        context["retry_after_s"] = float(data.get("retry_after_s", 1.0))
    if issubclass(cls, SandboxDiedInside | SandboxExhausted):
        context["died_of"] = inside_cause(data.get("died_of"))
    elif issubclass(cls, ToolInputInvalid):
        context["argument"] = data.get("argument")
    return cls(str(data.get("message", "no message")), **context)


def inside_cause(value: object) -> InsideCause | None:
    """Return the cause that a message names; None if it names none that is known."""
    with contextlib.suppress(ValueError):
        return InsideCause(str(value))
    return None


@contextlib.contextmanager
def boundary(error: type[AenvError], what: str) -> Iterator[None]:
    """Raise `error` in place of a foreign exception that leaves the block."""
    try:
        yield
    except AenvError:
        raise
    except Exception as exc:
        raise error(f"{what}: {type(exc).__name__}: {exc}") from exc
