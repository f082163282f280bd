"""The control side as a FastAPI application, and the OpenAPI document of the whole gateway."""

from __future__ import annotations

import copy
import functools
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import aenv_ray
from aenv_ray.serve.gateway.data import document as data_document
from aenv_ray.serve.gateway.envelope import error_response
from aenv_ray.serve.gateway.routes import (
    admin,
    artifacts,
    environments,
    instances,
    meta,
    services,
    streams,
)
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.routing import ControlRoute

_ROUTERS: Final = (
    meta.router,
    environments.router,
    artifacts.router,
    instances.router,
    streams.router,
    services.router,
    admin.tokens,
    admin.quotas,
    admin.pools,
    admin.nodes,
    admin.hub,
)
_DESCRIPTION: Final = (
    "Every JSON answer of a control route is an envelope: success, code (0, or the HTTP status), "
    "message, data; on failure also error, with code, message and hint. A request with "
    "AEnvCore-EnvInstance-ID or AEnvCore-MCPProxy-URL is for that instance, whatever its path is, "
    "/health included."
)


class ControlApi(FastAPI):
    """Serves the control routes."""

    def __init__(self, control: Control) -> None:
        self._documented = control_routes()
        super().__init__(
            routes=[_live(route) for route in self._documented],
            openapi_url=None,  # the gateway has its own route for it
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            exception_handlers={HTTPException: _on_http_exception},
        )
        self.state.control = control

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; overrides FastAPI's."""
        return self._document

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        document = get_openapi(
            title="aenv-ray gateway",
            version=aenv_ray.__version__,
            description=_DESCRIPTION,
            routes=self._documented,
        )
        for operations in document["paths"].values():
            for operation in operations.values():
                _drop_fastapi_errors(operation)
        schemas = document["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas.update(data_document.ERROR_SCHEMAS)
        document["paths"] |= data_document.paths()
        return document


async def _on_http_exception(request: Request, error: Exception) -> Response:
    return error_response(request, error)


def control_routes() -> list[ControlRoute]:
    """Return all control routes, as they are documented."""
    routes = [route for router in _ROUTERS for route in router.routes]
    return [route for route in routes if isinstance(route, ControlRoute)]


def _live(route: ControlRoute) -> ControlRoute:
    """Return a route as it is served: GET answers HEAD too, which the document leaves out."""
    live = copy.copy(route)
    if "GET" in live.methods:
        live.methods = live.methods | {"HEAD"}
    return live


def _drop_fastapi_errors(operation: dict[str, Any]) -> None:
    """Remove FastAPI's own answer to invalid parameters: ours is 400, in an envelope."""
    invalid = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
    if invalid.get("schema", {}).get("$ref", "").endswith("/HTTPValidationError"):
        del operation["responses"]["422"]
