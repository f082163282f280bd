"""The OpenAPI document: of the control side made from the same `Endpoint` objects that serve."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from aenv_ray.errors import (
    AenvError,
    ConfigError,
    FabricUnavailable,
    Forbidden,
    InternalError,
    RateLimited,
    Unauthorized,
)
from aenv_ray.serve.gateway.data import document as data_document
from aenv_ray.serve.gateway.routes.endpoint import Access, Endpoint

_REFERENCES: Final = "#/components/schemas/{model}"
_TEXT: Final = {"type": "string"}
_RETRY: Final = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}

_CONVERTOR: Final = re.compile(r":\w+(?=})")

Json = dict[str, Any]


def document(endpoints: Sequence[Endpoint], version: str) -> Json:
    """Return the document of these routes and of the data side's.

    Args:
        endpoints: All of the control side.
        version: Of aenv-ray.
    """
    schemas: Json = {"Error": _ERROR, **data_document.FAULTS}
    paths = data_document.paths()
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        path = _CONVERTOR.sub("", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aenv-ray gateway",
            "version": version,
            "description": "Every JSON answer of a control route is an envelope: success, code (0, "
            "or the HTTP status), message, data; on failure also error, with code, message and "
            "hint. A request with AEnvCore-EnvInstance-ID or AEnvCore-MCPProxy-URL is for that "
            "instance, whatever its path is, /health included.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR: Final[Json] = {
    "type": "object",
    "required": ["success", "code", "message", "data", "error"],
    "properties": {
        "success": {"const": False},
        "code": {"type": "integer", "description": "The HTTP status"},
        "message": _TEXT,
        "data": {"type": "null"},
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": _TEXT, "message": _TEXT, "hint": _TEXT},
        },
    },
}


def _operation(endpoint: Endpoint, schemas: Json) -> Json:
    operation: Json = {
        "operationId": _name_of(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": list(_parameters(endpoint, schemas)),
        "responses": _responses(endpoint, schemas),
    }
    if endpoint.access in {Access.OWNER, Access.ADMIN}:
        operation["security"] = [{"token": []}]
    if endpoint.body is not None:
        content = {"application/json": {"schema": _schema(endpoint.body, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.upload:
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": binary}
    return operation


def _name_of(endpoint: Endpoint) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", endpoint.path.lower()).strip("_")
    slash = "_all" if endpoint.path.endswith("/") else ""
    return f"{endpoint.method.lower()}_{words}{slash}"


def _parameters(endpoint: Endpoint, schemas: Json) -> Iterable[Json]:
    for name in re.findall(r"{(\w+)(?::\w+)?}", endpoint.path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    query = _resolved(_schema(endpoint.query, schemas), schemas)
    for name, schema in query.get("properties", {}).items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}
    for name, meaning in endpoint.headers.items():
        yield {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "pattern": "^[!-~]{1,200}$"},
            "description": meaning,
        }


def _responses(endpoint: Endpoint, schemas: Json) -> Json:
    responses: Json = {"200": _success(endpoint, schemas)}
    statuses: dict[int, list[str]] = {}
    always: tuple[type[AenvError], ...] = (ConfigError, InternalError, FabricUnavailable)
    if endpoint.access in {Access.OWNER, Access.ADMIN}:
        always += (Unauthorized, Forbidden, RateLimited)
    elif endpoint.access is Access.CAPABILITY:
        always += (Forbidden,)
    for error in (*endpoint.errors, *always):
        statuses.setdefault(error.http_status, []).append(error.code)
    if endpoint.body is not None or endpoint.upload:
        for status in (408, 413):  # it does not come, or is too large
            statuses.setdefault(status, []).append(ConfigError.code)
    for status, codes in sorted(statuses.items()):
        answer: Json = {
            "description": " or ".join(sorted(set(codes))),
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        if status in {429, 503}:
            answer["headers"] = _RETRY
        responses[str(status)] = answer
    return responses


def _success(endpoint: Endpoint, schemas: Json) -> Json:
    if endpoint.is_plain:
        content: Json = {endpoint.media: {"schema": {"type": "object"}}}
        return {"description": endpoint.summary, "content": content}
    if endpoint.media != "application/json":
        return {"description": endpoint.summary, "content": {endpoint.media: {"schema": _TEXT}}}
    data = {"type": "null"} if endpoint.data is None else _schema(endpoint.data, schemas)
    schema = {
        "type": "object",
        "required": ["success", "code", "message", "data"],
        "properties": {
            "success": {"const": True},
            "code": {"const": 0},
            "message": _TEXT,
            "data": data,
        },
    }
    return {"description": endpoint.summary, "content": {"application/json": {"schema": schema}}}


def _schema(kind: Any, schemas: Json) -> Json:
    mode = "validation" if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    is_asked = mode is not None and kind.__name__.endswith(("Request", "Change"))
    found = TypeAdapter(kind).json_schema(
        ref_template=_REFERENCES, mode="validation" if is_asked else "serialization"
    )
    schemas.update(found.pop("$defs", {}))
    if mode is not None and kind.__name__ not in schemas:
        schemas[kind.__name__] = found
    return {"$ref": _REFERENCES.format(model=kind.__name__)} if mode is not None else found


def _resolved(schema: Json, schemas: Json) -> Json:
    reference = schema.get("$ref")
    return schemas[reference.rpartition("/")[2]] if reference else schema
