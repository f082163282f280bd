"""From the runtime's JSON results to what handles return."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final

from aenv_ray.errors import AenvError, from_wire
from aenv_ray.models import ExecResult, FileEntry, ToolResult


def _exec(data: Mapping[str, Any]) -> ExecResult:
    return ExecResult(
        exit_code=data["exit_code"],
        stdout=base64.b64decode(data["stdout"]),
        stderr=base64.b64decode(data["stderr"]),
        truncated=data["truncated"],
        duration_s=data["duration_s"],
    )


def _batch(result: Mapping[str, Any]) -> list[ToolResult | AenvError]:
    return [
        ToolResult.from_wire(item["result"]) if "result" in item else from_wire(item["error"]["data"])
        for item in result["results"]
    ]


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tools/call": ToolResult.from_wire,
    "tools/list": lambda result: result["tools"],
    "ping": lambda result: result,
    "aenv/call_tools": _batch,
    "aenv/exec": lambda result: _exec(result["data"]),
    "aenv/functions": lambda result: result,
    "aenv/list_files": lambda result: [
        FileEntry.model_validate(entry) for entry in result["data"]["entries"]
    ],
    "aenv/read_file": lambda result: base64.b64decode(result["data"]["data"]),
    "aenv/write_file": lambda result: result["data"]["size_bytes"],
}


def decode(method: str, result: Any) -> Any:
    """Return the Python value of a fast-door result."""
    decoder = _DECODERS.get(method)
    return decoder(result) if decoder else result["data"]
