"""What a client of MCP over HTTP sends, and what its answers hold; it moves no bytes itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

PROTOCOL_VERSION: Final = "2025-06-18"
"""Asked for; the server may answer with an older one."""
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
    """Return a request; `request_id` is one that its session has not used."""
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def notification(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that asks for no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}


def cancellation(request_id: int) -> dict[str, Any]:
    """Return the parameters of ``notifications/cancelled``."""
    return {"requestId": request_id, "reason": "the caller cancelled"}


def session_headers(opened: Mapping[str, Any], received: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a session's further requests.

    Args:
        opened: The result of ``initialize``.
        received: The headers that came with it, in lower case.
    """
    headers = {"mcp-protocol-version": str(opened.get("protocolVersion"))}
    if SESSION in received:
        headers[SESSION] = received[SESSION]
    return headers


def forgets_session(status: int, text: str, *, has_session: bool) -> bool:
    """Whether an answer says that the server does not know the session, so that nothing ran."""
    return has_session and (status == 404 or (status == 400 and "session" in text.lower()))


def is_answer(message: Mapping[str, Any], request_id: int) -> bool:
    """Whether a message answers that request; a server may send requests of its own before."""
    return message.get("id") == request_id and "method" not in message


def message_of(content: str | bytes) -> dict[str, Any] | None:
    """Return the message that a body or event holds; None when it is no object.

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
        """Take a line without its end; return the message that it completes.

        Raises:
            ValueError: The event is not JSON.
        """
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            event = "\n".join(self._data)
            self._data.clear()
            return message_of(event)
        return None
