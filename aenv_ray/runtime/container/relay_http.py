"""A client of a public door on the loopback interface: HTTP and MCP with the standard library.

Each request has its own connection, so that a broken one affects no other request, and stopping a
call closes its connection. A request that may have reached the server is never sent again.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aenv_ray.runtime.door.calls import CallInterrupted, current_call
from aenv_ray.runtime.faults import INVALID_PARAMS, Fault
from aenv_ray.runtime.public import mcp_messages
from aenv_ray.runtime.public.mcp_messages import ACCEPT, SESSION

_CONNECT_S: Final = 5.0
_CANCEL_S: Final = 2.0
_TEXT_LIMIT: Final = 500


class _SessionUnknown(Exception):
    """The server does not know the session, so it did not run the request."""


class PublicServer:
    """A public door. Thread-safe.

    Args:
        port: The server's port on the loopback interface.

    Requests have no timeout; the deadline of the call that makes one ends it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._ids = itertools.count(1)
        self._opening = threading.Lock()
        self._session: dict[str, str] | None = None

    @property
    def is_listening(self) -> bool:
        """Whether the server accepts connections."""
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=_CONNECT_S).close()
        except OSError:
            return False
        return True

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Make one HTTP request.

        Args:
            method: HTTP method.
            path: The path, with its query.
            body: Sent as JSON; None sends no body.

        Returns:
            The status and the answer: parsed JSON, or text if it is not JSON.

        Raises:
            Fault: ``fabric_unavailable``: nothing was sent; ``call_outcome_unknown``: no answer.
        """
        with self._exchange(method, path, body, {}) as response:
            content = response.read()
        try:
            return response.status, json.loads(content)
        except ValueError:
            return response.status, content.decode(errors="replace")

    def rpc(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Make one MCP request and return its result; progress is reported to the current call.

        Raises:
            Fault: The server refused it; otherwise as for `ask`.
        """
        session = self._open()
        try:
            return self._rpc(method, params, session)
        except _SessionUnknown:
            with self._opening:
                if self._session is session:
                    self._session = None
        try:
            return self._rpc(method, params, self._open())
        except _SessionUnknown as exc:
            text = f"the image's server forgets sessions: {exc}"
            raise Fault("fabric_unavailable", text) from exc

    # --- MCP --------------------------------------------------------------------------------

    def _open(self) -> dict[str, str]:
        with self._opening:
            if self._session is None:
                received: dict[str, str] = {}
                result = self._rpc("initialize", mcp_messages.OPENING, {}, received)
                session = mcp_messages.session_headers(result, received)
                self._notify("notifications/initialized", {}, session)
                self._session = session
            return self._session

    def _notify(self, method: str, params: Mapping[str, Any], session: Mapping[str, str]) -> None:
        message = mcp_messages.notification(method, params)
        with self._exchange("POST", "/mcp", message, session) as response:
            response.read()

    def _rpc(
        self,
        method: str,
        params: Mapping[str, Any],
        session: Mapping[str, str],
        received: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        request_id = next(self._ids)
        message = mcp_messages.request(request_id, method, params)
        try:
            with self._exchange("POST", "/mcp", message, session) as response:
                if received is not None:
                    received.update((key.lower(), value) for key, value in response.getheaders())
                _check(response, has_session=SESSION in session)
                for answer in _messages(response):
                    if mcp_messages.is_answer(answer, request_id):
                        return _result(answer)
                    if answer.get("method") == "notifications/progress":
                        report = answer.get("params") or {}
                        current_call().progress(
                            report.get("progress", 0), report.get("total"), report.get("message")
                        )
        except CallInterrupted:
            with contextlib.suppress(Fault):  # the server is gone
                cancelled = mcp_messages.cancellation(request_id)
                self._notify("notifications/cancelled", cancelled, session)
            raise
        raise _unknown("the response ended without a result")

    # --- HTTP -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its response; stopping the call closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_CONNECT_S)
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as exc:
                raise Fault(
                    "fabric_unavailable", f"the image's server does not accept connections: {exc}"
                ) from exc
            sock = connection.sock
            call = current_call()
            if call.is_cancelled:
                sock.settimeout(_CANCEL_S)  # only to send the cancellation
            else:
                sock.settimeout(None)
                call.bind_stop(lambda: _shut(sock))
            sent = {**ACCEPT, **headers}
            content = None
            if body is not None:
                content = json.dumps(body).encode()
                sent["content-type"] = "application/json"
            try:
                connection.request(method, path, content, sent)
                yield connection.getresponse()
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise _unknown(f"{type(exc).__name__}: {exc}") from exc


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed already
        sock.shutdown(socket.SHUT_RDWR)


def _check(response: http.client.HTTPResponse, *, has_session: bool) -> None:
    """Raise for an error status."""
    status = response.status
    if status < 400:
        return
    text = response.read().decode(errors="replace")
    if mcp_messages.forgets_session(status, text, has_session=has_session):
        raise _SessionUnknown(text[:_TEXT_LIMIT])
    with contextlib.suppress(ValueError, KeyError, TypeError):
        raise _refusal(json.loads(text)["error"])
    if status < 500:
        raise Fault(
            "config_error", f"the image's server answered HTTP {status}: {text[:_TEXT_LIMIT]}"
        )
    raise _unknown(f"HTTP {status}: {text[:_TEXT_LIMIT]}")


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    if answer.get("error") is not None:
        raise _refusal(answer["error"])
    result = answer.get("result")
    return result if isinstance(result, dict) else {}


def _refusal(error: Mapping[str, Any]) -> Fault:
    """Return the fault for a JSON-RPC error."""
    data = error.get("data")
    message = str(error["message"])
    if isinstance(data, dict) and "code" in data:
        known = {"code", "message", "hint"}
        context = {key: value for key, value in data.items() if key not in known}
        return Fault(str(data["code"]), message, data.get("hint"), **context)
    if error.get("code") == INVALID_PARAMS:
        is_unknown = message.lower().startswith("unknown tool")
        return Fault("tool_not_found" if is_unknown else "tool_input_invalid", message)
    return Fault("internal_error", f"the image's server refused: {message}")


def _unknown(reason: str) -> Fault:
    return Fault(
        "call_outcome_unknown",
        f"the image's server received the call and did not answer it: {reason}",
        "it may have run, and was not sent again",
    )


def _messages(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON-RPC messages of a response: plain JSON or an event stream."""
    if not (response.getheader("content-type") or "").startswith("text/event-stream"):
        message = mcp_messages.parse_message(response.read())
        if message is not None:
            yield message
        return
    stream = mcp_messages.EventStream()
    for raw in response:
        message = stream.feed(raw.decode(errors="replace").rstrip("\r\n"))
        if message is not None:
            yield message
