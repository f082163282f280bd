"""Addresses of environment servers, and what their answers mean: values and our errors."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from aenv_ray.client.mcp_session import RpcError
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    FabricUnavailable,
    FunctionFailed,
    InternalError,
    ToolInputInvalid,
    ToolNotFound,
    from_wire,
)

DEFAULT_PORT: Final = 8081


def parse_address(address: str) -> str:
    """Return the base URL of an environment server, without a trailing slash.

    Args:
        address: ``host``, ``host:port``, ``[ipv6]:port``, or a URL, whose scheme, port and path
            prefix are kept. Without a port it is 8081, whatever the scheme.

    Raises:
        ConfigError: It is no such address.
    """
    text = address.strip()
    hint = "write it as host, host:port or http(s)://host[:port][/prefix]"
    if "://" not in text:
        is_bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
        text = f"http://[{text}]" if is_bare_ipv6 else f"http://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port or DEFAULT_PORT
    except ValueError as exc:
        raise ConfigError(f"address {address!r}: {exc}", hint=hint) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"address {address!r} is no address of a server", hint=hint)
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(f"an address has no user, query or fragment: {parts.hostname}", hint=hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


class MethodNotAllowed(ConfigError):
    """The path takes another HTTP method; nothing ran."""


def query_text(value: Any) -> str:
    """Return a value as it goes into a query string."""
    return value if isinstance(value, str) else json.dumps(value)


def json_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object of an answer; None when it is none."""
    try:
        body = response.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def read_envelope(response: httpx.Response, name: str) -> Any:
    """Return the ``data`` of an answer.

    Raises:
        AenvError: The one that the answer, or else its status, describes.
    """
    body = json_object(response)
    if response.is_success and body is not None and body.get("success"):
        return body.get("data")
    status = response.status_code
    text = str(body.get("error")) if body and "error" in body else response.text[:500]
    if status == 405:
        raise MethodNotAllowed(text, hint="name the function's own HTTP method")
    if body and "code" in body:
        raise from_wire({**body, "message": text})
    if status == 404:
        raise ToolNotFound(f"there is no function {name!r}", tool_name=name)
    if status in {400, 413, 422}:
        raise ToolInputInvalid(text, tool_name=name)
    if status in {401, 403, 421}:
        raise ConfigError(f"{response.url} refuses this client: HTTP {status}: {text}")
    if status in {429, 503}:
        raise FabricUnavailable(f"{response.url} answered HTTP {status}: {text}")
    if body is None and status in {502, 504}:
        raise CallOutcomeUnknown(f"{name!r}: a proxy answered HTTP {status}: {text}")
    raise FunctionFailed(text or f"HTTP {status}", tool_name=name)


def from_rpc(error: RpcError, name: str) -> AenvError:
    """Return our error for a JSON-RPC error."""
    if isinstance(error.data, dict) and "code" in error.data:
        return from_wire(error.data)
    if error.code == -32602:
        unknown = error.message.lower().startswith("unknown tool")
        return (ToolNotFound if unknown else ToolInputInvalid)(error.message, tool_name=name)
    return InternalError(f"{name}: the server refused: {error.message} (JSON-RPC {error.code})")
