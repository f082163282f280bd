"""Converts the return values of functions to the wire format."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, Literal

import pydantic_core
from pydantic import BaseModel

RESULT_LIMIT_BYTES: Final = 10 * 1024 * 1024
"""Largest text of a result; more is cut, with a mark (invariant 12)."""

_WRAPPED: Final = {"aenv/wrapped": True, "fastmcp": {"wrap_result": True}}
_IMAGE_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)


@dataclass(frozen=True)
class Image:
    """An image that a tool returns to a model."""

    data: bytes
    mime_type: str = "image/png"


@dataclass(frozen=True)
class Audio:
    """A recording that a tool returns to a model."""

    data: bytes
    mime_type: str = "audio/wav"


@dataclass(frozen=True)
class EmbeddedResource:
    """A file or document that a tool returns, with its URI."""

    uri: str
    content: str | bytes
    mime_type: str = ""
    """"" is ``text/plain`` for text and ``application/octet-stream`` for bytes."""

    def contents(self) -> dict[str, str]:
        """Return the MCP ``TextResourceContents`` or ``BlobResourceContents`` object."""
        if isinstance(self.content, str):
            kind = self.mime_type or "text/plain"
            return {"uri": self.uri, "mimeType": kind, "text": _clean_text(self.content)}
        kind = self.mime_type or "application/octet-stream"
        blob = base64.b64encode(self.content).decode()
        return {"uri": self.uri, "mimeType": kind, "blob": blob}


@dataclass(frozen=True)
class PromptMessage:
    """A message of a prompt."""

    content: str | Image | Audio | EmbeddedResource
    role: Literal["user", "assistant"] = "user"


@dataclass(frozen=True)
class Passed:
    """A ``CallToolResult`` object of another server, which is passed on unchanged."""

    result: dict[str, Any]


def to_json(value: Any) -> bytes:
    """Return `value` as JSON bytes.

    NaN and infinities become strings, since JSON has no number for them and null would hide them.
    Bytes become text if they are UTF-8, otherwise base64. Lone surrogates become U+FFFD.

    Raises:
        ValueError: It cannot be converted: it has a cycle, is nested too deeply, or has a type
            without a JSON form.
    """
    try:
        return pydantic_core.to_json(value, inf_nan_mode="strings", bytes_mode="utf8")
    except (pydantic_core.PydanticSerializationError, UnicodeError):
        pass  # perhaps because of invalid text or bytes: replace those and try again
    except (RecursionError, ValueError) as exc:
        raise ValueError(f"{type(value).__name__} cannot be JSON: {exc}") from exc
    try:
        return pydantic_core.to_json(_cleaned(value), inf_nan_mode="strings", bytes_mode="utf8")
    except (pydantic_core.PydanticSerializationError, RecursionError, ValueError) as exc:
        raise ValueError(f"{type(value).__name__} cannot be JSON: {exc}") from exc


def _cleaned(value: Any) -> Any:
    """Return plain data in which all text and bytes can be JSON."""
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return base64.b64encode(data).decode()
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cleaned({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, BaseModel):
        return _cleaned(value.model_dump())
    return value


def tool_result(value: Any, limit_bytes: int = RESULT_LIMIT_BYTES) -> dict[str, Any]:
    """Return the MCP ``CallToolResult`` object for a tool's return value.

    A JSON object becomes text and ``structuredContent``. Any other JSON value is structured as
    ``{"result": value}``, and marked with ``aenv/wrapped`` and FastMCP's equivalent. Images, bytes
    and MCP content blocks become blocks. Text over `limit_bytes` is cut, with a mark and
    ``aenv/truncated``.

    Raises:
        ValueError: The value cannot be converted to JSON.
    """
    if isinstance(value, str):
        text = _clean_text(value)
        result: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": False}
        if len(text) > limit_bytes // 4:
            result = _limited(result, limit_bytes)
            text = result["content"][0]["text"]
        result["structuredContent"] = {"result": text}
        result["_meta"] = {**result.get("_meta", {}), **_WRAPPED}
        return result
    if isinstance(value, Passed):
        return _limited(value.result, limit_bytes)
    blocks = _blocks(value)
    if blocks is not None:
        return _limited({"content": blocks, "isError": False}, limit_bytes)
    encoded = to_json(value)
    if len(encoded) > limit_bytes:
        text = encoded[:limit_bytes].decode(errors="ignore")
        return _cut([{"type": "text", "text": text}], len(encoded), limit_bytes)
    # Decoding gives plain data for any value, such as a model, a dataclass or an enum.
    plain = pydantic_core.from_json(encoded)
    result = {"content": [{"type": "text", "text": encoded.decode()}], "isError": False}
    if isinstance(plain, dict):
        result["structuredContent"] = plain
    elif value is not None:
        result["structuredContent"] = {"result": plain}
        result["_meta"] = dict(_WRAPPED)
    else:
        result["content"] = []
    return result


def resource_result(uri: str, mime_type: str, value: Any) -> dict[str, Any]:
    """Return the MCP ``ReadResourceResult`` object for what a resource's function returned.

    Raises:
        ValueError: The value cannot be converted to JSON.
    """
    items = value if isinstance(value, list) and value else [value]
    if not all(isinstance(item, EmbeddedResource) for item in items):
        if isinstance(value, bytearray | memoryview):
            value = bytes(value)
        elif not isinstance(value, str | bytes):
            value, mime_type = to_json(value).decode(), mime_type or "application/json"
        items = [EmbeddedResource(uri, value, mime_type)]
    return {"contents": [item.contents() for item in items]}


def prompt_result(description: str | None, value: Any) -> dict[str, Any]:
    """Return the MCP ``GetPromptResult`` object for what a prompt's function returned.

    Raises:
        ValueError: The value cannot be converted to JSON.
    """
    messages = []
    for item in value if isinstance(value, list) else [value]:
        message = item if isinstance(item, PromptMessage) else PromptMessage(item)
        block = _block(message.content) or {"type": "text", "text": _as_text(message.content)}
        messages.append({"role": message.role, "content": block})
    return {"description": description or "", "messages": messages}


def error_result(
    text: str, error_type: str, limit_bytes: int = RESULT_LIMIT_BYTES
) -> dict[str, Any]:
    """Return the ``CallToolResult`` of a tool that raised."""
    result: dict[str, Any] = {
        "content": [{"type": "text", "text": _clean_text(text)}],
        "isError": True,
    }
    if len(text) > limit_bytes // 4:
        result = _limited(result, limit_bytes)
    result.setdefault("_meta", {})["aenv/error_type"] = error_type
    return result


MAX_COMPLETIONS: Final = 100
"""MCP's limit for one answer."""


def completion_result(values: Any) -> dict[str, Any]:
    """Return the MCP ``CompleteResult`` for what a function of completions returned.

    Raises:
        TypeError: It is no list of texts.
    """
    found = [] if values is None else list(values)
    if isinstance(values, str) or not all(isinstance(value, str) for value in found):
        raise TypeError(f"it returned {values!r:.100}, which is not a list of texts")
    shown = found[:MAX_COMPLETIONS]
    about = {"values": shown, "total": len(found), "hasMore": len(found) > len(shown)}
    return {"completion": about}


def _clean_text(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _blocks(value: Any) -> list[dict[str, Any]] | None:
    """Return content blocks for values such as images; None for plain JSON values."""
    block = _block(value)
    if block is not None:
        return [block]
    if isinstance(value, list) and value and len(value) <= 1000:
        blocks = [_block(item) for item in value]
        if any(blocks):
            return [
                b if b is not None else {"type": "text", "text": _as_text(item)}
                for b, item in zip(blocks, value, strict=True)
            ]
    return None


def _as_text(value: Any) -> str:
    return _clean_text(value) if isinstance(value, str) else to_json(value).decode()


def _block(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Image):
        return _binary("image", value.data, value.mime_type)
    if isinstance(value, Audio):
        return _binary("audio", value.data, value.mime_type)
    if isinstance(value, EmbeddedResource):
        return {"type": "resource", "resource": value.contents()}
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        for magic, mime_type in _IMAGE_MAGIC:
            if data.startswith(magic):
                return _binary("image", data, mime_type)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":  # or audio, video
            return _binary("image", data, "image/webp")
        contents = EmbeddedResource("aenv://result", data).contents()
        return {"type": "resource", "resource": contents}
    if type(value).__module__.startswith("PIL.") and hasattr(value, "save"):
        buffer = BytesIO()
        value.save(buffer, format="PNG")
        return _binary("image", buffer.getvalue(), "image/png")
    if type(value).__module__.startswith(("mcp.", "mcp_types")) and hasattr(value, "model_dump"):
        dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
        return dumped if "type" in dumped else None
    return None


def _binary(kind: str, data: bytes, mime_type: str) -> dict[str, Any]:
    return {"type": kind, "data": base64.b64encode(data).decode(), "mimeType": mime_type}


def _limited(result: dict[str, Any], limit_bytes: int) -> dict[str, Any]:
    """Cut text blocks so that all blocks fit; drop binary blocks that do not fit."""
    total = 0
    room = limit_bytes
    blocks: list[dict[str, Any]] = []
    for block in result["content"]:
        resource = block.get("resource", {})
        payload = (
            block.get("text")
            or block.get("data")
            or resource.get("blob")
            or resource.get("text", "")
        )
        encoded = payload.encode()
        total += len(encoded)
        if len(encoded) <= room:
            blocks.append(block)
            room -= len(encoded)
        elif block.get("type") == "text":
            blocks.append({"type": "text", "text": encoded[:room].decode(errors="ignore")})
            room = 0
    if total <= limit_bytes:
        return result
    return _cut(blocks, total, limit_bytes) | {"isError": result.get("isError", False)}


def _cut(blocks: list[dict[str, Any]], total: int, limit_bytes: int) -> dict[str, Any]:
    mark = f"\n[output cut: the first {limit_bytes} of {total} bytes]"
    for block in reversed(blocks):
        if block["type"] == "text":
            block["text"] += mark
            break
    else:
        blocks.append({"type": "text", "text": mark.strip()})
    return {"content": blocks, "isError": False, "_meta": {"aenv/truncated": True}}
