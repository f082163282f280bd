"""The messages between a handle and its host: one bytes object per call, one result back.

The caller encodes a call's parameters and decodes its result; the host only forwards the bytes. A
call is a single bytes object because this is cheapest in Ray: it serializes each argument of a
task separately, and does not pickle bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import pydantic_core

from aenv_ray.engines.base import read_json
from aenv_ray.errors import (
    AenvError,
    ConfigError,
    InsideCause,
    SandboxDiedInside,
    ToolInputInvalid,
    reported_by_sandbox,
)
from aenv_ray.ids import CallId, InstanceId
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    PromptMessages,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)
from aenv_ray.runtime.api.results import RESULT_LIMIT_BYTES
from aenv_ray.runtime.door.door import MAX_MESSAGE_BYTES

MAX_CALL_BYTES: Final = MAX_MESSAGE_BYTES - 1024
"""Largest JSON of a call's parameters; the rest of the limit is for the message around them."""
MAX_WRITE_BYTES: Final = (MAX_CALL_BYTES - 65_536) // 4 * 3
"""Maximum file bytes in one call, which sends them as base64; the rest is for the path."""
MAX_REWARD_BYTES: Final = RESULT_LIMIT_BYTES + 65_536
"""JSON of a reward's result, which is in the record of its episode; a runtime sends no more."""
CALL_GRACE_S: Final = 5.0
"""If a sandbox has not answered this long after the call's deadline, it counts as lost."""


def exec_result(data: Mapping[str, Any]) -> ExecResult:
    """Return the result of a command from its JSON data."""
    return ExecResult(
        exit_code=data["exit_code"],
        stdout=base64.b64decode(data["stdout"]),
        stderr=base64.b64decode(data["stderr"]),
        truncated=data["truncated"],
        duration_s=data["duration_s"],
    )


def _tool_result(result: dict[str, Any]) -> ToolResult:
    """Return a result whose methods do not raise, whatever the sandbox sent.

    A policy that raised because of one would void its episode.
    """
    found = ToolResult.from_wire(result)
    for block in _objects(found.content, "content"):
        if block.get("type") == "text" and not isinstance(block.get("text", ""), str):
            raise TypeError("its text is not a string")
    structured: Any = found.structured
    meta: Any = found.meta
    if not isinstance(structured, dict | None) or not isinstance(meta, dict):
        raise TypeError("its structured content, or its _meta, is not an object")
    if structured is not None and meta.get("aenv/wrapped") and "result" not in structured:
        raise KeyError("result")
    return found


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise TypeError(f"its {what} is not a list of objects")
    return value


def _tools(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    for tool in (tools := _objects(result["tools"], "list of tools")):
        # A server that is not ours may leave the schema out.
        schema = tool.setdefault("inputSchema", {"type": "object"})
        if not isinstance(tool["name"], str) or not isinstance(schema, dict):
            raise TypeError("a tool has no name, or its schema is not an object")
    return tools


def _batch(result: Mapping[str, Any]) -> list[ToolResult | AenvError]:
    return [
        _tool_result(item["result"])
        if "result" in item
        else reported_by_sandbox(item["error"]["data"], "aenv/call_tools")
        for item in result["results"]
    ]


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tools/call": _tool_result,
    "tools/list": _tools,
    "resources/list": lambda result: _objects(result["resources"], "list of resources"),
    "resources/templates/list": lambda result: _objects(
        result["resourceTemplates"], "list of resource templates"
    ),
    "resources/read": lambda result: [
        ResourceContents.from_wire(part) for part in result["contents"]
    ],
    "prompts/list": lambda result: _objects(result["prompts"], "list of prompts"),
    "prompts/get": PromptMessages.from_wire,
    "ping": lambda result: result,
    "aenv/call_tools": _batch,
    "aenv/exec": lambda result: exec_result(result["data"]),
    "aenv/functions": lambda result: result,
    "aenv/list_files": lambda result: [
        FileEntry.model_validate(entry) for entry in result["data"]["entries"]
    ],
    "aenv/read_file": lambda result: base64.b64decode(result["data"]["data"]),
    "aenv/reset": lambda result: ResetResult.model_validate(result["data"]),
    "aenv/tasks": lambda result: TaskPage(
        tasks=result["data"]["tasks"], next_offset=result["data"]["next"]
    ),
    "aenv/write_file": lambda result: result["data"]["size_bytes"],
}


class CallMessage(NamedTuple):
    """One call from a handle to its host."""

    instance_id: InstanceId
    method: str
    """A fast-door method."""
    timeout_s: float
    """Seconds after which the runtime stops the call."""
    params: bytes
    """JSON object on one line, ``_meta`` included."""
    sent_at: float = 0.0
    """Wall-clock seconds at which a pipelined call was sent; 0 if it was not pipelined."""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        head = f"{self.instance_id}\n{self.method}\n{self.timeout_s!r}\n{self.sent_at!r}\n"
        return head.encode() + self.params

    @classmethod
    def decode(cls, data: bytes) -> CallMessage:
        """Parse the output of `encode`."""
        instance_id, method, timeout_s, sent_at, params = data.split(b"\n", 4)
        name = InstanceId(instance_id.decode())
        return cls(name, method.decode(), float(timeout_s), params, float(sent_at))


def call_message(
    instance_id: InstanceId,
    method: str,
    params: Mapping[str, Any],
    call_id: CallId,
    timeout_s: Any,
    sent_at: float = 0.0,
    more_meta: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the bytes of a call; see `CallMessage`.

    Raises:
        ToolInputInvalid: The arguments cannot be encoded as JSON, or exceed one message.
        ConfigError: The timeout is not a positive number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(
            f"invalid timeout {timeout_s!r} of a call of {instance_id}: expected a number of "
            "seconds above 0",
            hint="leave the timeout out for the default",
        )
    meta = {**(more_meta or {}), "aenv/call_id": call_id, "aenv/timeout_s": timeout_s}
    try:
        encoded = pydantic_core.to_json({**params, "_meta": meta}, inf_nan_mode="strings")
    except (pydantic_core.PydanticSerializationError, ValueError) as exc:
        name = params.get("name")
        raise ToolInputInvalid(
            f"the arguments of {name or method!r} cannot be encoded as JSON: {exc}",
            tool_name=name,
            hint="pass strings, numbers, lists and dicts with string keys",
        ) from None
    if len(encoded) > MAX_CALL_BYTES:
        # The runtime would close the connection, which ends all calls of the instance.
        name = params.get("name")
        raise ToolInputInvalid(
            f"the arguments of {name or method!r} are {len(encoded):,} bytes of JSON, more than "
            f"the limit of {MAX_CALL_BYTES:,} per call",
            tool_name=name,
            hint="write large data to a file of the sandbox, in pieces, and pass the path",
        )
    return CallMessage(instance_id, method, float(timeout_s), encoded, sent_at).encode()


# --- calling -------------------------------------------------------------------------------------


class WireResult:
    """A result in JSON that unpickles to the decoded value.

    Decoding thus takes place in the caller's process, not in the host, which serves many instances.
    """

    __slots__ = ("_data", "_method")

    def __init__(self, method: str, data: bytes) -> None:
        self._method = method
        self._data = data

    @property
    def json(self) -> bytes:
        """The result as JSON text."""
        return self._data

    def __reduce__(self) -> tuple[Any, ...]:
        return (decode_json, (self._method, self._data))


def decode_json(method: str, data: bytes) -> Any:
    """Return the Python value of a result's JSON text.

    Raises:
        SandboxDiedInside: The text is malformed JSON, or as for `decode`.
    """
    try:
        if method == "aenv/reward" and len(data) > MAX_REWARD_BYTES:
            raise ValueError(f"{len(data)} bytes; the limit is {MAX_REWARD_BYTES}")
        result = read_json(data)
    except ValueError as exc:
        raise _malformed(method, exc) from None
    return decode(method, result)


def decode(method: str, result: Any) -> Any:
    """Return the Python value of a fast-door result.

    Raises:
        SandboxDiedInside: The result is malformed, so it is not from our runtime: something in the
            sandbox answered in its place.
    """
    decoder = _DECODERS.get(method)
    try:
        return decoder(result) if decoder else result["data"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _malformed(method, exc) from None


def _malformed(method: str, exc: Exception) -> SandboxDiedInside:
    return SandboxDiedInside(
        f"the sandbox answered {method} with a malformed result: {type(exc).__name__}: {exc}",
        died_of=InsideCause.CONNECTION,
        hint="release the instance and create another",
    )
