"""Builds the messages of an MCP client over HTTP and parses responses, without any I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

PROTOCOL_VERSION: Final = "2025-06-18"
"""The version to request; the server may answer with an older one."""
ACCEPT: Final = {"accept": "application/json, text/event-stream"}
SESSION: Final = "mcp-session-id"
"""The header that names a session."""
OPENING: Final[Mapping[str, Any]] = {
    "protocolVersion": PROTOCOL_VERSION,
    "capabilities": {},
    "clientInfo": {"name": "aenv-ray", "version": "0.1"},
}
"""The parameters of ``initialize``."""


def request(request_id: int, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request; `request_id` must be new in its session."""
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def notification(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a notification, which gets no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def cancellation(request_id: int) -> dict[str, Any]:
    """Return the parameters of ``notifications/cancelled``."""
    return {"requestId": request_id, "reason": "the caller cancelled"}


def session_headers(opened: Mapping[str, Any], received: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for the further requests of a session.

    Args:
        opened: The result of ``initialize``.
        received: The headers of that response, in lower case.
    """
    headers = {"mcp-protocol-version": str(opened.get("protocolVersion"))}
    if SESSION in received:
        headers[SESSION] = received[SESSION]
    return headers


def forgets_session(status: int, text: str, *, has_session: bool) -> bool:
    """Whether a response says that the server does not know the session, so nothing ran."""
    return has_session and (status == 404 or (status == 400 and "session" in text.lower()))


def is_answer(message: Mapping[str, Any], request_id: int) -> bool:
    """Whether a message answers that request; the server may send its own requests before."""
    return message.get("id") == request_id and "method" not in message


def parse_message(content: str | bytes) -> dict[str, Any] | None:
    """Return the message in a body or event; None if it is not a JSON object.

    Raises:
        ValueError: It is not JSON.
    """
    message = json.loads(content) if content else None
    return message if isinstance(message, dict) else None


class EventStream:
    """The messages of an event stream, line by line."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> dict[str, Any] | None:
        """Parse a line, given without its newline; return the message that it completes.

        Raises:
            ValueError: The event is not JSON.
        """
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            event = "\n".join(self._data)
            self._data.clear()
            return parse_message(event)
        return None
