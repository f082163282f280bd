"""Errors of calls, as they are sent to callers.

The codes are those of the caller's error tree, which the runtime does not import.
"""

from __future__ import annotations

import re
from typing import Any, Final

# JSON-RPC 2.0 reserves -32768..-32000; MCP clients show `message` to people.
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
SERVER_ERROR: Final = -32000

FOR_THE_MODEL: Final = frozenset({"tool_not_found", "tool_input_invalid", "tool_timeout"})
"""Faults that a model can react to: sent as results with ``isError``, not as JSON-RPC errors.

MCP requires this, and AEnvironment's server does so. Its client counts every JSON-RPC error as a
broken environment, and gives up after five.
"""

_RPC_CODES = {"tool_not_found": INVALID_PARAMS, "tool_input_invalid": INVALID_PARAMS}
_REQUEST = re.compile(rb'\{"jsonrpc":"2\.0","id":([0-9]{1,18}),')
"""The beginning of a request from our hosts."""


class Fault(Exception):
    """A call without a result: it was refused or stopped, or its function failed.

    Args:
        code: A code of the error tree, for example ``tool_not_found``.
        message: What happened, with names and limits.
        hint: What the caller can do.
        context: Further JSON data, for example ``tool_name``.
    """

    def __init__(self, code: str, message: str, hint: str | None = None, **context: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.context = context

    def data(self) -> dict[str, Any]:
        """Return the error as JSON data for the caller's error tree."""
        data: dict[str, Any] = {"code": self.code, "message": self.message, **self.context}
        if self.hint:
            data["hint"] = self.hint
        return data

    def rpc_error(self) -> dict[str, Any]:
        """Return the JSON-RPC error object."""
        code = _RPC_CODES.get(self.code, SERVER_ERROR)
        return {"code": code, "message": self.message, "data": self.data()}


def fault_result(fault: Fault) -> dict[str, Any]:
    """Return the ``CallToolResult`` of a refused call, with the error data in ``_meta``."""
    text = f"{fault.message}. {fault.hint}" if fault.hint else fault.message
    return {
        "content": [{"type": "text", "text": text}],
        "isError": True,
        "_meta": {"aenv/error": fault.data()},
    }


def unread(line: bytes, error: ValueError) -> dict[str, Any]:
    """Return the answer to a line that cannot be parsed.

    Hosts send valid JSON, but arguments may be nested too deeply, or have a number with too many
    digits. Then only the call with this id fails.
    """
    head = _REQUEST.match(line)
    if head is None:
        rpc_error = {"code": PARSE_ERROR, "message": f"not JSON: {error}"}
        return {"jsonrpc": "2.0", "id": None, "error": rpc_error}
    fault = Fault(
        "tool_input_invalid",
        f"the arguments cannot be read: {error}",
        "nest them less deeply, and write long numbers as text",
    )
    return {"jsonrpc": "2.0", "id": int(head[1]), "error": fault.rpc_error()}


class ProjectLoadError(Exception):
    """The project's code does not load; the message contains the traceback."""
