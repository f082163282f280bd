"""The data side in the OpenAPI document: the routes of instances, written down by hand.

Their bodies are those of MCP and of the environments, which no schema here can know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    CatalogConflict,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    FileAccessError,
    Forbidden,
    FunctionFailed,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    InternalError,
    PortUnreachable,
    SandboxLost,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
    Unauthorized,
)
from aenv_ray.serve.gateway.data.functions import MethodRefused

Json = dict[str, Any]

TAG: Final = "data"
_ALWAYS: Final[tuple[type[AenvError], ...]] = (
    ConfigError, Unauthorized, Forbidden, InstanceNotFound, InstanceExpired, InstanceReleased,
    SandboxLost, FabricUnavailable, InternalError,
)  # fmt: skip
_CALL: Final[tuple[type[AenvError], ...]] = (
    ToolNotFound, ToolInputInvalid, ToolTimeout, DeadlineExceeded, CallOutcomeUnknown,
)  # fmt: skip
_TEXT: Final = {"type": "string"}
_ANY: Final = "application/octet-stream"
_OBJECT: Final = {"type": "object"}

FAULTS: Final[Mapping[str, Json]] = {
    "DoorError": {
        "type": "object",
        "required": ["success", "error", "code"],
        "properties": {"success": {"const": False}, "error": _TEXT, "code": _TEXT, "hint": _TEXT},
    },
    "RpcError": {
        "type": "object",
        "required": ["jsonrpc", "id", "error"],
        "properties": {
            "jsonrpc": {"const": "2.0"},
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {"code": {"type": "integer"}, "message": _TEXT, "data": {}},
            },
        },
    },
}
"""The forms that a failure has here, beside ``Error``."""

_HEADERS: Final = {
    "AEnvCore-EnvInstance-ID": "The instance; with a token.",
    "AEnvCore-MCPProxy-URL": "http://<ip>:8081 with the instance's ip, in place of a token.",
}
_RPC: Final = {
    "application/json": {"schema": _OBJECT},
    "text/event-stream": {"schema": _TEXT},
}
_MESSAGE: Final = {"application/json": {"schema": _OBJECT}}
_BYTES: Final = {_ANY: {"schema": {"type": "string", "format": "binary"}}}


def _envelope(data: Json) -> Json:
    properties = {"success": {"const": True}, "data": data}
    schema = {"type": "object", "required": ["success", "data"], "properties": properties}
    return {"application/json": {"schema": schema}}


@dataclass(frozen=True)
class _Door:
    """One operation."""

    method: str
    path: str
    summary: str
    content: Json | None
    """Of the answer that means success; None: it has no body."""
    fault: str = "Error"
    """Name of the form of its failures."""
    errors: tuple[type[AenvError], ...] = ()
    body: Json | None = None
    query: Mapping[str, tuple[Json, str]] = field(default_factory=dict)
    is_passed_on: bool = False
    """The answer is that of a server in the instance, whatever it is."""

    @property
    def names_its_target(self) -> bool:
        """Whether the path says which instance or service it is for, and no header does."""
        return "{id}" in self.path or "{service}" in self.path


_PATH: Final = {"path": (_TEXT, "In the sandbox; relative to the work directory.")}
_NUMBER: Final = {"type": "string", "pattern": "^[0-9]{1,15}$"}


def _mcp(path: str, *errors: type[AenvError]) -> tuple[_Door, ...]:
    return (
        _Door("post", path, "MCP: one JSON-RPC message; tools, and nothing else", _RPC,
              "RpcError", (*_CALL, *errors), _MESSAGE),
        _Door("delete", path, "MCP: end a session, of which nothing is kept", None, "RpcError",
              errors),
    )  # fmt: skip


_INSTANCE: Final = "/instances/{id}"
_DOORS: Final = (
    *_mcp(f"{_INSTANCE}/mcp"),
    _Door("get", f"{_INSTANCE}/info", "Facts of an instance, its isolation included",
          _envelope(_OBJECT)),
    _Door("get", f"{_INSTANCE}/files/list", "A directory in an instance",
          _envelope({"type": "array", "items": _OBJECT}), errors=(FileAccessError,), query=_PATH),
    _Door("get", f"{_INSTANCE}/files", "A file's bytes", _BYTES, errors=(FileAccessError,),
          query=_PATH | {"offset": (_NUMBER, "First byte."), "length": (_NUMBER, "At most.")}),
    _Door("put", f"{_INSTANCE}/files", "Write a file", _envelope(_OBJECT),
          errors=(FileAccessError,), body=_BYTES,
          query=_PATH | {"append": ({"enum": ["true", "false"]}, "At its end."),
                         "mode": ({"type": "string", "pattern": "^[0-7]{3}$"}, "Octal.")}),
    *(
        _Door(method, f"{_INSTANCE}/ports/{{port}}{rest}", "HTTP to a server in an instance, on a "
              "declared port; WebSockets too", None, errors=(PortUnreachable, ToolNotFound),
              is_passed_on=True)
        for rest in ("", "/{path}")
        for method in ("get", "post", "put", "patch", "delete")
    ),
    *_mcp("/services/{id}/mcp", CatalogConflict),
    *(
        _Door(method, f"/services/{{id}}/ports/{{port}}{rest}", "HTTP to a server in a replica of "
              "a service, on its port or a declared one; WebSockets too", None,
              errors=(PortUnreachable, ToolNotFound, CatalogConflict), is_passed_on=True)
        for rest in ("", "/{path}")
        for method in ("get", "post", "put", "patch", "delete")
    ),
    *(
        _Door(method, "/services/{id}/{path}", "A service's functions, rewards and health, at the "
              "paths of its environment", _envelope({}), "DoorError",
              (*_CALL, FunctionFailed, MethodRefused, CatalogConflict),
              _MESSAGE if method == "post" else None)
        for method in ("get", "post")
    ),
    *_mcp("/mcp"),
    _Door("get", "/functions/list", "What an instance offers to trainers (AEnvironment)",
          _envelope(_OBJECT), "DoorError", _CALL),
    *(
        _Door("post", path, summary, _envelope({}), "DoorError",
              (*_CALL, FunctionFailed, MethodRefused), _MESSAGE)
        for path, summary in (
            ("/functions/{path}", "Call a function; also at the path that it chose (AEnvironment)"),
            ("/task/reward", "Call the reward (AEnvironment)"),
            ("/task/reward/{path}", "Call a reward by its name"),
        )
    ),
)  # fmt: skip


def paths() -> dict[str, Json]:
    """Return the paths of the data side, as an OpenAPI document has them."""
    found: dict[str, Json] = {}
    for door in _DOORS:
        found.setdefault(door.path, {})[door.method] = _operation(door)
    return found


def _operation(door: _Door) -> Json:
    words = door.path.strip("/").replace("{", "").replace("}", "").replace("/", "_")
    operation: Json = {
        "operationId": f"data_{door.method}_{words}",
        "summary": door.summary,
        "tags": [TAG],
        "security": [{"token": []}],
        "parameters": _parameters(door),
        "responses": _responses(door),
    }
    if not door.names_its_target:
        operation["security"].append({})  # the address is the credential
    if door.body is not None:
        operation["requestBody"] = {"required": door.body is _BYTES, "content": door.body}
    return operation


def _parameters(door: _Door) -> list[Json]:
    def one(name: str, where: str, schema: Json, meaning: str) -> Json:
        needed = where == "path" or (name == "path" and door.path.endswith("/files"))
        return {
            "name": name,
            "in": where,
            "required": needed,
            "schema": schema,
            "description": meaning,
        }

    known = {
        "id": ({"type": "string", "minLength": 1}, "The instance."),
        "service": ({"type": "string", "minLength": 1}, "The service."),
        "port": ({"type": "integer", "minimum": 1, "maximum": 65535}, "Of deployConfig.ports."),
        "path": ({"type": "string", "minLength": 1}, "May have slashes."),
    }
    found = [one(n, "path", *known[n]) for n in known if f"{{{n}}}" in door.path]
    found += [one(name, "query", *value) for name, value in door.query.items()]
    if not door.names_its_target:
        shape = {"type": "string", "minLength": 1, "pattern": "^[!-~]{1,200}$"}
        found += [one(name, "header", shape, meaning) for name, meaning in _HEADERS.items()]
    return found


def _responses(door: _Door) -> Json:
    done: Json = {"description": door.summary}
    if door.content is not None:
        done["content"] = door.content
    if "{service}" in door.path:  # its replicas answer, and refuse, in their own words
        return {"default": done}
    responses: Json = {"200": done}
    if door.content is _RPC:
        responses["202"] = {"description": "A notification was taken"}
    codes: dict[int, set[str]] = {}
    for error in (*door.errors, *_ALWAYS):
        codes.setdefault(error.http_status, set()).add(error.code)
    for status, names in sorted(codes.items()):
        responses[str(status)] = _failure(" or ".join(sorted(names)), door.fault)
    if door.body is not None:
        form = "Error" if door.fault == "Error" else "DoorError"
        responses["408"] = _failure("the body does not come", form)
        responses["413"] = _failure("the body is larger than 64 MiB", form)
    if door.is_passed_on:
        responses["default"] = {"description": "What the server in the instance answers"}
    return responses


def _failure(description: str, form: str) -> Json:
    schema = {"$ref": f"#/components/schemas/{form}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
