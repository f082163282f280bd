"""The data side in the OpenAPI document: one table of the routes of instances and services.

FastAPI documents the control routes. The bodies of the data routes are those of MCP and of the
environments, which no schema here can describe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    SandboxDiedInside,
    SandboxExhausted,
    SandboxLost,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
    Unauthorized,
)
from aenv_ray.serve.gateway.data.functions import MethodRefused

Json = dict[str, Any]
Failures = dict[int | str, dict[str, Any]]
"""Documented error answers by HTTP status, as the `responses` of a FastAPI route."""
Errors = tuple[type[AenvError], ...]
Query = Mapping[str, tuple[Json, str]]

TAG: Final = "data"
_ALWAYS: Final[Errors] = (
    ConfigError, Unauthorized, Forbidden, InstanceNotFound, InstanceExpired, InstanceReleased,
    SandboxLost, SandboxDiedInside, FabricUnavailable, InternalError,
)  # fmt: skip
_CALL: Final[Errors] = (
    ToolNotFound, ToolInputInvalid, ToolTimeout, DeadlineExceeded, CallOutcomeUnknown,
)  # fmt: skip
_FUNCTION: Final[Errors] = (*_CALL, FunctionFailed, SandboxExhausted, MethodRefused)
_TEXT: Final = {"type": "string"}
_NAME: Final = {"type": "string", "minLength": 1}
_OBJECT: Final = {"type": "object"}


def _object(**properties: Any) -> Json:
    return {"type": "object", "required": [*properties], "properties": properties}


_ERROR: Final = _object(code=_TEXT, message=_TEXT)
_ERROR["properties"]["hint"] = _TEXT
_DOOR_ERROR: Final = _object(success={"const": False}, error=_TEXT, code=_TEXT)
_DOOR_ERROR["properties"]["hint"] = _TEXT
_RPC_ERROR: Final = _object(code={"type": "integer"}, message=_TEXT)
_RPC_ERROR["properties"]["data"] = {}

ERROR_SCHEMAS: Final[Mapping[str, Json]] = {
    "Error": _object(
        success={"const": False},
        code={"type": "integer", "description": "The HTTP status"},
        message=_TEXT,
        data={"type": "null"},
        error=_ERROR,
    ),
    "DoorError": _DOOR_ERROR,
    "RpcError": _object(jsonrpc={"const": "2.0"}, error=_RPC_ERROR, id={}),
}
"""The three forms of an error answer: of the control side, of functions, of MCP."""

_ADDRESS_HEADERS: Final = {
    "AEnvCore-EnvInstance-ID": "The instance; needs a token.",
    "AEnvCore-MCPProxy-URL": "http://<ip>:8081 with the instance's ip, instead of a token.",
}
_RPC: Final = {"application/json": {"schema": _OBJECT}, "text/event-stream": {"schema": _TEXT}}
_JSON: Final = {"application/json": {"schema": _OBJECT}}
_BYTES: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _envelope(data: Json) -> Json:
    return {"application/json": {"schema": _object(success={"const": True}, data=data)}}


@dataclass(frozen=True)
class _Route:
    """One operation."""

    method: str
    path: str
    summary: str
    content: Json | None
    """Content of a successful answer; None: it has no body."""
    error_schema: str = "Error"
    """Key of `ERROR_SCHEMAS`."""
    errors: Errors = ()
    body: Json | None = None
    query: Query = field(default_factory=dict)
    is_proxied: bool = False
    """The answer comes from a server in the instance, whatever it is."""

    @property
    def is_addressed_by_path(self) -> bool:
        """Whether the path, and not a header, names the instance or service."""
        return "{id}" in self.path


_PATH: Final[Query] = {"path": (_TEXT, "In the sandbox; relative to the work directory.")}
_NUMBER: Final = {"type": "string", "pattern": "^[0-9]{1,15}$"}
_READ: Final[Query] = {
    **_PATH,
    "offset": (_NUMBER, "First byte."),
    "length": (_NUMBER, "At most this many bytes."),
}
_WRITE: Final[Query] = {
    **_PATH,
    "append": ({"enum": ["true", "false"]}, "Append to the file."),
    "mode": ({"type": "string", "pattern": "^[0-7]{3}$"}, "Octal."),
}


def _mcp(path: str, *errors: type[AenvError]) -> Iterator[_Route]:
    call = "MCP: one JSON-RPC message; tools, resources and prompts are offered"
    yield _Route("post", path, call, _RPC, "RpcError", (*_CALL, *errors), _JSON)
    yield _Route("delete", path, "MCP: end a session", None, "RpcError", errors)


def _ports(base: str, summary: str, *errors: type[AenvError]) -> Iterator[_Route]:
    errors = (PortUnreachable, ToolNotFound, *errors)
    for path in (f"{base}/ports/{{port}}", f"{base}/ports/{{port}}/{{path}}"):
        for method in ("get", "post", "put", "patch", "delete"):
            yield _Route(method, path, summary, None, errors=errors, is_proxied=True)


def _function(method: str, path: str, summary: str, *errors: type[AenvError]) -> _Route:
    body = _JSON if method == "post" else None
    return _Route(method, path, summary, _envelope({}), "DoorError", (*_FUNCTION, *errors), body)


_INSTANCE: Final = "/instances/{id}"
_SERVICE: Final = "/services/{id}"
_FILE: Final[Errors] = (FileAccessError,)
_SERVICE_CALL: Final = "Functions, rewards and health of a service, at the paths of its environment"
_ROUTES: Final = (
    *_mcp(f"{_INSTANCE}/mcp"),
    _Route("get", f"{_INSTANCE}/info", "Show an instance, its isolation included",
           _envelope(_OBJECT)),
    _Route("get", f"{_INSTANCE}/files/list", "List a directory",
           _envelope({"type": "array", "items": _OBJECT}), errors=_FILE, query=_PATH),
    _Route("get", f"{_INSTANCE}/files", "Read a file", _BYTES, errors=_FILE, query=_READ),
    _Route("put", f"{_INSTANCE}/files", "Write a file", _envelope(_OBJECT), errors=_FILE,
           body=_BYTES, query=_WRITE),
    *_ports(_INSTANCE, "HTTP or a WebSocket to a declared port of an instance"),
    *_mcp(f"{_SERVICE}/mcp", CatalogConflict),
    *_ports(_SERVICE, "HTTP or a WebSocket to a port of a service's replica", CatalogConflict),
    _function("get", f"{_SERVICE}/{{path}}", _SERVICE_CALL, CatalogConflict),
    _function("post", f"{_SERVICE}/{{path}}", _SERVICE_CALL, CatalogConflict),
    *_mcp("/mcp"),
    _Route("get", "/functions/list", "List the functions, rewards and health checks of an instance "
           "(AEnvironment)", _envelope(_OBJECT), "DoorError", _CALL),
    _function("post", "/functions/{path}", "Call a function; also at the path that its environment "
              "chose (AEnvironment)"),
    _function("post", "/task/reward", "Call the reward (AEnvironment)"),
    _function("post", "/task/reward/{path}", "Call a reward by its name"),
)  # fmt: skip


def paths() -> dict[str, Json]:
    """Return the paths of the data side for the OpenAPI document."""
    found: dict[str, Json] = {}
    for route in _ROUTES:
        found.setdefault(route.path, {})[route.method] = _operation(route)
    return found


def _operation(route: _Route) -> Json:
    words = route.path.strip("/").replace("{", "").replace("}", "").replace("/", "_")
    operation: Json = {
        "operationId": f"data_{route.method}_{words}",
        "summary": route.summary,
        "tags": [TAG],
        "security": [{"token": []}],
        "parameters": list(_parameters(route)),
        "responses": _responses(route),
    }
    if not route.is_addressed_by_path:
        operation["security"].append({})  # the address header is a credential too
    if route.body is not None:
        operation["requestBody"] = {"required": route.body is _BYTES, "content": route.body}
    return operation


_PATH_PARAMETERS: Final = {
    "id": (_NAME, "The instance or service."),
    "port": ({"type": "integer", "minimum": 1, "maximum": 65535}, "Of deployConfig.ports."),
    "path": (_NAME, "May contain slashes."),
}


def _parameters(route: _Route) -> Iterator[Json]:
    def parameter(name: str, where: str, schema: Json, meaning: str, *, required: bool) -> Json:
        return {
            "name": name, "in": where, "required": required, "schema": schema,
            "description": meaning,
        }  # fmt: skip

    for name, value in _PATH_PARAMETERS.items():
        if f"{{{name}}}" in route.path:
            yield parameter(name, "path", *value, required=True)
    for name, value in route.query.items():
        is_required = name == "path" and route.path.endswith("/files")
        yield parameter(name, "query", *value, required=is_required)
    if not route.is_addressed_by_path:
        schema = _NAME | {"pattern": "^[!-~]{1,200}$"}
        for name, meaning in _ADDRESS_HEADERS.items():
            yield parameter(name, "header", schema, meaning, required=False)


def _responses(route: _Route) -> Json:
    success: Json = {"description": route.summary}
    if route.content is not None:
        success["content"] = route.content
    responses: Json = {"200": success}
    if route.content is _RPC:
        responses["202"] = {"description": "A notification was accepted"}
    found = failures(*route.errors, *_ALWAYS, schema=route.error_schema)
    if route.body is not None:
        schema = "Error" if route.error_schema == "Error" else "DoorError"
        found |= {status: _failure({ConfigError.code}, schema) for status in BODY_FAILURES}
    responses |= {str(status): found[status] for status in sorted(found)}
    if route.is_proxied:
        responses["default"] = {"description": "The answer of the server in the instance"}
    return responses


OR: Final = " or "


def failures(*errors: type[AenvError], schema: str = "Error") -> Failures:
    """Return the documented answers of a route that may raise these errors.

    For a control route, `ControlRoute` adds those that every route may raise.
    """
    codes: dict[int, set[str]] = {}
    for error in errors:
        codes.setdefault(error.http_status, set()).add(error.code)
    return {status: _failure(names, schema, status) for status, names in codes.items()}


def _failure(codes: set[str], schema: str = "Error", status: int = 0) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    answer: dict[str, Any] = {
        "description": OR.join(sorted(codes)),
        "content": {"application/json": {"schema": reference}},
    }
    if status in {429, 503}:
        seconds = {"schema": {"type": "integer"}, "description": "Seconds"}
        answer["headers"] = {"Retry-After": seconds}
    return answer


BODY_FAILURES: Final[Failures] = {status: _failure({ConfigError.code}) for status in (408, 413)}
"""Failures of a route with a body: the body stops arriving, or is too large."""
