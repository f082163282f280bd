"""Stateless MCP over HTTP: parsing of messages and formatting of answers, as pure functions.

One endpoint serves both generations of the protocol. Versions up to 2025-11-25 begin with
``initialize``, which gives the client a session id. It contains what the client offers to tools; no
other state belongs to it, so any replica answers any request of the session. Requests to a client
have ids that name the question in its instance, so any replica takes the answer. Version 2026-07-28
has no sessions.

`load` imports the SDK's versions and rules when the first client connects: the import takes half a
second, which would delay the start of every replica.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic_core
from starlette.responses import Response

from aenv_ray.actors.calls.caller_notes import Report, note_of
from aenv_ray.errors import AenvError, to_wire
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.caller_link import WITHDRAWN
from aenv_ray.runtime.door.subscriptions import SUBSCRIBE, UNSUBSCRIBE
from aenv_ray.runtime.faults import (
    FOR_THE_MODEL,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    Fault,
    fault_result,
)

SESSION_HEADER: Final = "mcp-session-id"
VERSION_HEADER: Final = "mcp-protocol-version"
_SERVER: Final = {"name": "aenv-ray", "version": "0.1.0"}
_SERVER_META: Final = {"io.modelcontextprotocol/serverInfo": _SERVER}
_OK: Final = 200
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_VERSIONS: Final = "mcp_types.version"
_RULES: Final = "mcp.shared.inbound"
_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
"""In ``_meta`` of the version without sessions: the client wants log messages."""

_EMPTY: Final[Mapping[str, dict[str, Any]]] = {
    "ping": {},
    "logging/setLevel": {},
}
"""Requests of old clients with a constant answer, the same as our public door gives."""
_LISTINGS: Final = frozenset(
    {"tools/list", "resources/list", "resources/templates/list", "prompts/list"}
)
CALLS: Final = frozenset({"tools/call", "resources/read", "prompts/get", "completion/complete"})
"""Requests that run code of an instance, and can be cancelled."""
_SUBSCRIPTIONS: Final = frozenset({SUBSCRIBE, UNSUBSCRIBE})
"""Requests of sessions."""
OF_INSTANCE: Final = _LISTINGS | CALLS | _SUBSCRIPTIONS
"""Requests that an instance answers."""
_CAPABILITIES: Final = {
    "tools": {"listChanged": False},
    "resources": {"listChanged": False, "subscribe": False},
    "prompts": {"listChanged": False},
    "completions": {},
    "logging": {},
}
_SESSION_CAPABILITIES: Final = {
    **_CAPABILITIES,
    "resources": {"listChanged": False, "subscribe": True},
}
_OFFERS: Final = {"elicitation": "e", "sampling": "s"}
"""What a client may offer, and the letter for it in the id of its session."""
_QUESTION: Final = "aenv-"
"""Beginning of the ids of requests to a client."""
_LOADED: Final[set[str]] = set()


@dataclass(frozen=True)
class RpcAnswer:
    """The HTTP answer to one message."""

    body: bytes
    status: int = _OK
    session: str = ""
    """Session id for its header; "" for none."""

    def response(self) -> Response:  # noqa: D102
        headers = {SESSION_HEADER: self.session} if self.session else None
        return Response(self.body, self.status, headers=headers, media_type="application/json")


@dataclass(frozen=True)
class Rpc:
    """One JSON-RPC message of a client."""

    id: str | int | None
    """None for a notification, which gets no answer."""
    method: str
    """"" for an answer of the client."""
    params: Mapping[str, Any]
    is_modern: bool
    """Whether it uses the version without sessions."""
    session: str
    """"" for none."""
    answered: str = ""
    """If the client answers a question: the id of the question in the instance; else ""."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    """If the client answers a question: its ``result`` or ``error``."""

    @property
    def offers(self) -> list[str]:
        """What the client offers to tools."""
        if self.is_modern:
            return ["logging"] if _LOG_LEVEL in self.meta else []
        if not self.session:
            return []
        letters = self.session.partition("-")[2]
        return ["logging", *(offer for offer, letter in _OFFERS.items() if letter in letters)]

    @property
    def meta(self) -> Mapping[str, Any]:
        """The params' ``_meta``."""
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> str | int | None:
        """Token for progress reports; None if the client wants none."""
        token = self.meta.get("progressToken")
        return token if isinstance(token, str | int) else None

    def cancel_name(self, request_id: Any) -> str:
        """Return the name by which a request can be cancelled; "" outside a session.

        It names no target, since the revision of a service may change before the cancellation.
        """
        return f"{self.session}\n{request_id!r}" if self.session else ""

    def own_answer(self) -> RpcAnswer | None:
        """Return the answer that is the same for all instances; None if the instance must answer.

        Methods that neither the gateway nor an instance knows are refused here.
        """
        if self.method in OF_INSTANCE and not (self.is_modern and self.method in _SUBSCRIPTIONS):
            return None
        result = self._own_result()
        if result is None:
            error = {"code": METHOD_NOT_FOUND, "message": "Method not found", "data": self.method}
            return RpcAnswer(
                self._error(error), _NOT_FOUND if self.is_modern else _OK, self.session
            )
        is_new = self.method == "initialize"
        return RpcAnswer(
            self._result(to_json(result)), session=self._new_session() if is_new else self.session
        )

    def _new_session(self) -> str:
        offered = self.params.get("capabilities")
        known = offered if isinstance(offered, dict) else {}
        letters = "".join(letter for offer, letter in _OFFERS.items() if offer in known)
        return f"{secrets.token_hex(16)}-{letters}" if letters else secrets.token_hex(16)

    def _own_result(self) -> dict[str, Any] | None:
        from mcp_types import version

        if self.method == "initialize" and not self.is_modern:
            asked = self.params.get("protocolVersion")
            is_known = asked in version.HANDSHAKE_PROTOCOL_VERSIONS
            return {
                "protocolVersion": asked if is_known else version.LATEST_HANDSHAKE_VERSION,
                "capabilities": _SESSION_CAPABILITIES,
                "serverInfo": _SERVER,
            }
        if self.method == "server/discover" and self.is_modern:
            return {
                "supportedVersions": list(version.MODERN_PROTOCOL_VERSIONS),
                "capabilities": _CAPABILITIES,
                "resultType": "complete",
                "ttlMs": 0,
                "cacheScope": "private",
                "_meta": _SERVER_META,
            }
        return None if self.is_modern else _EMPTY.get(self.method)

    def answer(self, result: bytes) -> RpcAnswer:
        """Return the answer with an instance's result, in the client's protocol version.

        Args:
            result: JSON text of the result.
        """
        if self.is_modern:
            extra = b'{"resultType":"complete"'
            if self.method in _LISTINGS or self.method == "resources/read":
                extra += b',"ttlMs":0,"cacheScope":"private"'
            result = extra + (b"}" if result == b"{}" else b"," + result[1:])
        return RpcAnswer(self._result(result), session=self.session)

    def failure(self, error: AenvError) -> RpcAnswer:
        """Return the answer to a request that failed.

        An error that a model can act on becomes a result with ``isError``; any other becomes a
        JSON-RPC error with our code in ``data``. In a session its HTTP status is 200: older clients
        treat any other status as a broken session, and some then wait forever.
        """
        fault = fault_of(error)
        if self.is_for_the_model(error):
            return self.answer(to_json(fault_result(fault)))
        status = _OK if self.session else error.http_status
        return RpcAnswer(self._error(fault.rpc_error()), status, self.session)

    def is_for_the_model(self, error: AenvError) -> bool:
        """Return whether the answer to a failed request is a result, which a model can act on."""
        return self.method == "tools/call" and error.code in FOR_THE_MODEL

    def told(self, report: Report) -> bytes | None:
        """Return the message for a report of a call; None if the client did not ask for it."""
        note = note_of(report)
        if note is not None:
            return self._noted(note)
        return None if self.progress_token is None else self._progress(report)

    def _noted(self, note: Mapping[str, Any]) -> bytes:
        """Return the message for what a tool tells or asks the client."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": note["method"]}
        params, question = note.get("params") or {}, note.get("question")
        if note["method"] == WITHDRAWN:
            params = {"requestId": f"{_QUESTION}{question}"}
        elif question is not None:
            message["id"] = f"{_QUESTION}{question}"
        return to_json({**message, "params": params})

    def _progress(self, report: Report) -> bytes:
        done, total, message = report
        params: dict[str, Any] = {"progressToken": self.progress_token, "progress": done}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        return to_json({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})

    def _result(self, result: bytes) -> bytes:
        return b'{"jsonrpc":"2.0","id":' + to_json(self.id) + b',"result":' + result + b"}"

    def _error(self, error: Mapping[str, Any]) -> bytes:
        return to_json({"jsonrpc": "2.0", "id": self.id, "error": error})


class Refused(Exception):
    """A POST without a valid message, with the answer to it."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body.decode())
        self.status = status
        self.body = body


async def import_parser(headers: Mapping[str, str]) -> None:
    """Import what `parse` needs for a POST, in a thread that does not block the event loop."""
    for module in (_VERSIONS, _RULES):
        if module not in _LOADED:
            await asyncio.to_thread(importlib.import_module, module)
            _LOADED.add(module)
        if not _is_modern(headers):
            return


def _is_modern(headers: Mapping[str, str]) -> bool:
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

    version = headers.get(VERSION_HEADER)
    return version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS


def parse(body: bytes, headers: Mapping[str, str]) -> Rpc:
    """Return the message in a POST.

    Raises:
        Refused: The body is not a valid JSON-RPC message.
    """
    is_modern = _is_modern(headers)
    try:
        message = pydantic_core.from_json(body)
    except ValueError as exc:
        raise _refused(None, PARSE_ERROR, f"the body is not JSON: {exc}") from None
    if not isinstance(message, dict):
        raise _refused(None, INVALID_REQUEST, "the body is not a JSON-RPC object")
    request_id, method = message.get("id"), message.get("method", "")
    params = message.get("params")
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        raise _refused(None, INVALID_REQUEST, "the body is not a JSON-RPC 2.0 message")
    if not isinstance(params, dict | None):
        raise _refused(request_id, INVALID_REQUEST, "params is not an object")
    is_request = "id" in message and bool(method)
    if is_request and (isinstance(request_id, bool) or not isinstance(request_id, str | int)):
        raise _refused(None, INVALID_REQUEST, "the id of a request must be a string or an integer")
    if is_modern:
        _check_modern(message, headers, request_id)
    answered = ""
    if not method and isinstance(request_id, str) and request_id.startswith(_QUESTION):
        answered = request_id.removeprefix(_QUESTION)
    return Rpc(
        id=request_id if is_request else None,
        method=method,
        params=params or {},
        is_modern=is_modern,
        session="" if is_modern else headers.get(SESSION_HEADER, ""),
        answered=answered,
        reply={key: message[key] for key in ("result", "error") if key in message},
    )


def _check_modern(message: Mapping[str, Any], headers: Mapping[str, str], request_id: Any) -> None:
    """Reject a message that breaks the rules of the version without sessions."""
    from mcp.shared.inbound import (
        ERROR_CODE_HTTP_STATUS,
        InboundLadderRejection,
        classify_inbound_request,
        unsupported_protocol_version_rejection,
    )

    verdict: Any
    if "id" in message:
        verdict = classify_inbound_request(message, headers=dict(headers))
    else:
        verdict = unsupported_protocol_version_rejection(headers[VERSION_HEADER])
    if isinstance(verdict, InboundLadderRejection):
        status = ERROR_CODE_HTTP_STATUS.get(verdict.code, _OK)
        raise _refused(request_id, verdict.code, verdict.message, verdict.data, status)


def _refused(
    request_id: Any, code: int, message: str, data: Any = None, status: int = _BAD_REQUEST
) -> Refused:
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return Refused(status, to_json({"jsonrpc": "2.0", "id": request_id, "error": error}))


def fault_of(error: AenvError) -> Fault:
    """Return an error in the runtime's wire format."""
    data = to_wire(error)
    code, message = data.pop("code"), data.pop("message")
    return Fault(code, message, data.pop("hint", None), **data)
