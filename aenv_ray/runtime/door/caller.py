"""What a tool can send to its caller, besides progress, and what it can request from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from aenv_ray.runtime.faults import Fault

LEVELS: Final = (
    "debug",
    "info",
    "notice",
    "warning",
    "error",
    "critical",
    "alert",
    "emergency",
)
"""Levels of log messages in MCP, from the least severe."""
DEFAULT_TIMEOUT_S: Final = 60.0
"""AEnvironment's documented default for a call."""


class Caller(Protocol):
    """The caller of one call. Thread-safe."""

    def log(self, level: str, message: str, data: Any) -> None:
        """Send a log message; one that cannot be delivered is dropped."""
        ...

    def ask(self, method: str, params: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send an MCP request and return its result.

        Raises:
            Fault: ``caller_unsupported``: the caller does not offer it. ``tool_timeout``: no answer
                within `timeout_s`.
        """
        ...


@dataclass(frozen=True)
class Elicited:
    """What the user answered."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any]
    """The values by name; empty unless accepted."""


@dataclass(frozen=True)
class Sampled:
    """What the caller's model answered."""

    content: Mapping[str, Any]
    """An MCP content block."""
    model: str
    """Name of the model."""

    @property
    def text(self) -> str:
        """The text of the answer; "" if it is not text."""
        return str(self.content.get("text", ""))


def unsupported(what: str) -> Fault:
    """Return the fault of a request that the caller does not offer."""
    return Fault(
        "caller_unsupported",
        f"the caller of this call offers no {what}",
        "pass a callback for it to Environment, or call the tool from an MCP client that offers it "
        "in a session",
    )
