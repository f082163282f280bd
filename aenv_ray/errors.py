"""Every error aenv-ray raises, drawn as one tree, and its one mapping to and from the wire.

    AenvError                        code, http_status, retryable (class facts); hint (instance)
    ├─ ConfigError                   the caller's settings, arguments or project are wrong     400
    │  └─ ArtifactTooLarge           a file is larger than the store takes                     413
    ├─ EnvironmentNotFound           no such environment                                       404
    ├─ ServiceNotFound               no such service                                           404
    ├─ ArtifactNotFound              the artifact store does not have it                       404
    ├─ ArtifactDamaged               bytes are not those that their digest names               422
    ├─ ArtifactStoreDenied           the artifact store refuses us                             502
    ├─ ArtifactStoreFull             the artifact store has no room                            507
    ├─ CatalogConflict               the catalog as it is does not allow it                    409
    │  ├─ VersionConflict            the version exists with other content
    │  └─ EnvironmentInUse           instances or services use it
    ├─ Unauthorized                  no token, or none that is known                           401
    ├─ Forbidden                     the token may not do this                                 403
    ├─ CapacityExceeded              no room now; carries retry_after_s          retryable     429
    │  ├─ QuotaExceeded              an owner or a label has as many as it may   retryable     429
    │  └─ RateLimited                too many requests of one token          retryable     429
    ├─ InstanceError                 carries instance_id
    │  ├─ InstanceNotFound           never existed here, or is long gone                       404
    │  ├─ InstanceExpired            its TTL, idle timeout or owner ended it                   410
    │  ├─ InstanceReleased           somebody released it                                      410
    │  ├─ SandboxStartFailed         it could not be made, or its code does not load           502
    │  ├─ SandboxLost                the sandbox, its host or its node died: episode void      410
    │  │  └─ SessionLost             a service's replica is gone, with what a session kept     410
    │  ├─ CallOutcomeUnknown         the call may have run; its outcome cannot be known        504
    │  ├─ FileAccessError            a path inside the sandbox cannot be read or written       400
    │  └─ PortUnreachable            nothing in the sandbox answers on it, or it hung up       502
    ├─ ToolError                     carries tool_name
    │  ├─ ToolNotFound                                                                         404
    │  ├─ ToolInputInvalid           arguments do not fit the schema                           422
    │  ├─ ToolTimeout                (also TimeoutError) stopped at its deadline               504
    │  ├─ CallCancelled              the caller cancelled; the tool was told                   499
    │  └─ FunctionFailed             a reward, function or health check raised                 500
    ├─ CircuitOpen                   too many infrastructure failures in a row   retryable     503
    ├─ FabricUnavailable             no Ray, controller, launcher, hub, artifacts retryable     503
    ├─ DeadlineExceeded              (also TimeoutError) we waited for something too long      504
    └─ InternalError                 our bug; please report it                                 500

A tool that raises is a *result* with ``is_error`` and never one of these. A dead sandbox is one of
these and never a result: in reinforcement learning a confusion of the two becomes a wrong reward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class AenvError(Exception):
    """Base of every error aenv-ray raises.

    Crosses Ray actors by pickle, so: only the message is positional, all context is keyword-only
    with a default, and instance data has no class-level default (Ray's dual exception class would
    read the default instead of the value).
    """

    code: ClassVar[str] = "aenv_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """What went wrong, without the hint."""
        return str(self.args[0]) if self.args else ""


class ConfigError(AenvError):
    """The caller's settings, arguments or project files are wrong; never retried."""

    code: ClassVar[str] = "config_error"
    http_status: ClassVar[int] = 400


class ArtifactTooLarge(ConfigError):
    """A file is larger than the artifact store takes."""

    code: ClassVar[str] = "artifact_too_large"
    http_status: ClassVar[int] = 413


class EnvironmentNotFound(AenvError):
    """No environment of that name, version or path."""

    code: ClassVar[str] = "environment_not_found"
    http_status: ClassVar[int] = 404


class ServiceNotFound(AenvError):
    """No service of that name is known."""

    code: ClassVar[str] = "service_not_found"
    http_status: ClassVar[int] = 404


class ArtifactNotFound(AenvError):
    """The artifact store has no file of that digest."""

    code: ClassVar[str] = "artifact_not_found"
    http_status: ClassVar[int] = 404


class ArtifactDamaged(AenvError):
    """Bytes are not those that their digest names: damaged on their way, or where they lay."""

    code: ClassVar[str] = "artifact_damaged"
    http_status: ClassVar[int] = 422


class ArtifactStoreDenied(AenvError):
    """The artifact store refuses our credentials, or its directory is another user's."""

    code: ClassVar[str] = "artifact_store_denied"
    http_status: ClassVar[int] = 502


class ArtifactStoreFull(AenvError):
    """The artifact store has no room for what was to be kept."""

    code: ClassVar[str] = "artifact_store_full"
    http_status: ClassVar[int] = 507


class CatalogConflict(AenvError):
    """The catalog as it is does not allow what was asked, for example a way between statuses."""

    code: ClassVar[str] = "catalog_conflict"
    http_status: ClassVar[int] = 409


class VersionConflict(CatalogConflict):
    """The version is published with other content: publish a new version."""

    code: ClassVar[str] = "version_conflict"


class EnvironmentInUse(CatalogConflict):
    """Instances or services use the version."""

    code: ClassVar[str] = "environment_in_use"


class Unauthorized(AenvError):
    """The request carries no token, or one that is unknown, ended or revoked."""

    code: ClassVar[str] = "unauthorized"
    http_status: ClassVar[int] = 401


class Forbidden(AenvError):
    """The token is known and may not do this."""

    code: ClassVar[str] = "forbidden"
    http_status: ClassVar[int] = 403


class CapacityExceeded(AenvError):
    """There is no room now; `retry_after_s` says when to try again."""

    code: ClassVar[str] = "capacity_exceeded"
    http_status: ClassVar[int] = 429
    retryable: ClassVar[bool] = True

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class QuotaExceeded(CapacityExceeded):
    """An owner or a label has as many instances as its quota allows."""

    code: ClassVar[str] = "quota_exceeded"


class RateLimited(CapacityExceeded):
    """One token sends more requests than it may."""

    code: ClassVar[str] = "rate_limited"


class InstanceError(AenvError):
    """An operation on one instance failed."""

    code: ClassVar[str] = "instance_error"

    def __init__(
        self, message: str, *, instance_id: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.instance_id = instance_id


class InstanceNotFound(InstanceError):
    """No instance of that id is known here."""

    code: ClassVar[str] = "instance_not_found"
    http_status: ClassVar[int] = 404


class InstanceExpired(InstanceError):
    """The instance's TTL or idle timeout passed, or the job that owned it ended."""

    code: ClassVar[str] = "instance_expired"
    http_status: ClassVar[int] = 410


class InstanceReleased(InstanceError):
    """The instance was released; a call came after, or was under way."""

    code: ClassVar[str] = "instance_released"
    http_status: ClassVar[int] = 410


class SandboxStartFailed(InstanceError):
    """The sandbox could not be made, or the environment's code does not load in it."""

    code: ClassVar[str] = "sandbox_start_failed"
    http_status: ClassVar[int] = 502


class SandboxLost(InstanceError):
    """The sandbox, its host or its node died; the episode is void, not failed."""

    code: ClassVar[str] = "sandbox_lost"
    http_status: ClassVar[int] = 410


class SessionLost(SandboxLost):
    """The replica that kept a session's state is gone; the session begins anew with its next call.

    Told once for each session.
    """

    code: ClassVar[str] = "session_lost"


class CallOutcomeUnknown(InstanceError):
    """The call may have run and its outcome cannot be known; it was not run again."""

    code: ClassVar[str] = "call_outcome_unknown"
    http_status: ClassVar[int] = 504


class FileAccessError(InstanceError):
    """A path inside the sandbox cannot be read, written or listed."""

    code: ClassVar[str] = "file_access_error"
    http_status: ClassVar[int] = 400


class PortUnreachable(InstanceError):
    """Nothing in the sandbox answers on the port, or what did hung up."""

    code: ClassVar[str] = "port_unreachable"
    http_status: ClassVar[int] = 502


class ToolError(AenvError):
    """A tool, reward or function call was refused or stopped.

    A tool whose own code raised is not an error: it is a `ToolResult` with ``is_error``.
    """

    code: ClassVar[str] = "tool_error"

    def __init__(
        self, message: str, *, tool_name: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.tool_name = tool_name


class ToolNotFound(ToolError):
    """The environment has no tool, reward or function of that name."""

    code: ClassVar[str] = "tool_not_found"
    http_status: ClassVar[int] = 404


class ToolInputInvalid(ToolError):
    """The arguments do not fit the tool's input schema; the tool did not run."""

    code: ClassVar[str] = "tool_input_invalid"
    http_status: ClassVar[int] = 422


class ToolTimeout(ToolError, TimeoutError):
    """The call reached its deadline and was stopped."""

    code: ClassVar[str] = "tool_timeout"
    http_status: ClassVar[int] = 504


class CallCancelled(ToolError):
    """The caller cancelled the call and the tool was told to stop."""

    code: ClassVar[str] = "call_cancelled"
    http_status: ClassVar[int] = 499


class FunctionFailed(ToolError):
    """A reward, function or health check raised, or returned what cannot be a result."""

    code: ClassVar[str] = "function_failed"
    http_status: ClassVar[int] = 500


class CircuitOpen(AenvError):
    """Too many infrastructure failures in a row; the next probe is allowed after a pause."""

    code: ClassVar[str] = "circuit_open"
    http_status: ClassVar[int] = 503
    retryable: ClassVar[bool] = True


class FabricUnavailable(AenvError):
    """Ray, the controller, a node's launcher, the hub or the artifact store does not answer."""

    code: ClassVar[str] = "fabric_unavailable"
    http_status: ClassVar[int] = 503
    retryable: ClassVar[bool] = True


class DeadlineExceeded(AenvError, TimeoutError):
    """We waited for something longer than allowed; the message names what."""

    code: ClassVar[str] = "deadline_exceeded"
    http_status: ClassVar[int] = 504


class InternalError(AenvError):
    """A bug in aenv-ray; please report it with the message."""

    code: ClassVar[str] = "internal_error"


ERRORS: tuple[type[AenvError], ...] = (
    AenvError, ConfigError, ArtifactTooLarge, EnvironmentNotFound, ServiceNotFound,
    ArtifactNotFound, ArtifactDamaged, ArtifactStoreDenied, ArtifactStoreFull, CatalogConflict,
    VersionConflict, EnvironmentInUse, Unauthorized, Forbidden, CapacityExceeded, QuotaExceeded,
    RateLimited, InstanceError, InstanceNotFound, InstanceExpired, InstanceReleased,
    SandboxStartFailed, SandboxLost, SessionLost, CallOutcomeUnknown, FileAccessError,
    PortUnreachable, ToolError, ToolNotFound, ToolInputInvalid, ToolTimeout, CallCancelled,
    FunctionFailed, CircuitOpen, FabricUnavailable, DeadlineExceeded, InternalError,
)  # fmt: skip
"""Explicit, because Ray creates subclasses of our errors at run time."""

_BY_CODE = {error.code: error for error in ERRORS}

INFRASTRUCTURE: tuple[type[AenvError], ...] = (
    ArtifactNotFound, ArtifactDamaged, ArtifactStoreDenied, ArtifactStoreFull, CapacityExceeded,
    QuotaExceeded, RateLimited, InstanceExpired, InstanceReleased, InstanceNotFound,
    SandboxStartFailed, SandboxLost, SessionLost, CallOutcomeUnknown, CircuitOpen,
    FabricUnavailable, DeadlineExceeded, InternalError,
)  # fmt: skip
"""Errors that void an episode: they say nothing about the policy, so they are never a reward."""


def to_wire(error: AenvError) -> dict[str, Any]:
    """Return `error` as a JSON object: ``code``, ``message``, ``hint`` and its own context."""
    context = {key: value for key, value in vars(error).items() if value is not None}
    return {"code": error.code, "message": error.message, **context}


def from_wire(data: Mapping[str, Any], *, instance_id: str | None = None) -> AenvError:
    """Return the error that `to_wire` or the runtime described; never imports a name from it.

    Args:
        data: ``code``, ``message`` and optional context. An unknown code gives `InternalError`.
        instance_id: Filled in for instance errors that do not name one themselves.
    """
    cls = _BY_CODE.get(str(data.get("code")), InternalError)
    context: dict[str, Any] = {"hint": data.get("hint")}
    if issubclass(cls, InstanceError):
        context["instance_id"] = data.get("instance_id") or instance_id
    elif issubclass(cls, ToolError):
        context["tool_name"] = data.get("tool_name")
    elif issubclass(cls, CapacityExceeded):
        context["retry_after_s"] = float(data.get("retry_after_s", 1.0))
    return cls(str(data.get("message", "no message")), **context)


@contextlib.contextmanager
def boundary(error: type[AenvError], what: str) -> Iterator[None]:
    """Attribute a foreign exception that leaves the block to `error`; typed errors pass."""
    try:
        yield
    except AenvError:
        raise
    except Exception as exc:
        raise error(f"{what}: {type(exc).__name__}: {exc}") from exc
