"""The JSON envelope of every control answer, and the one table from errors to HTTP."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import pydantic_core
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response

from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    InternalError,
    Unauthorized,
    to_wire,
)

logger = logging.getLogger(__name__)

_RETRY_S = 1
"""``Retry-After`` of a retryable error that does not say how long to wait."""


def success(
    data: Any = None, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a successful answer."""
    body = {"success": True, "code": 0, "message": "", "data": data}
    return _json(body, status, headers)


def failure(
    error: AenvError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error answer.

    Args:
        error: Sent as a whole, so that a client raises the same error.
        status: HTTP status; None: the error's own.
        headers: Added to the answer.
    """
    code = status or error.http_status
    return _json(
        {
            "success": False,
            "code": code,
            "message": error.message,
            "data": None,
            "error": to_wire(error),
        },
        code,
        {**error_headers(error), **(headers or {})},
    )


def error_response(request: HTTPConnection, error: Exception) -> Response:
    """Return the answer to a request that raised an exception, and record it for the access log.

    Our own errors are sent as they are. Any other exception is a bug: it is logged with the
    request's id, and the answer contains only that id.
    """
    request.scope["aenv.error"] = error
    if isinstance(error, AenvError):
        return failure(error)
    if isinstance(error, HTTPException):
        method = request.scope.get("method", "GET")
        hint = {404: "GET /openapi.json lists all routes"}.get(error.status_code)
        return failure(
            ConfigError(f"{method} {request.url.path}: {error.detail}", hint=hint),
            status=error.status_code,
            headers=error.headers,
        )
    request_id = request.scope.get("aenv.request_id", "")
    logger.error("request %s failed", request_id, exc_info=error)
    return failure(
        InternalError(
            f"the gateway failed in request {request_id}",
            hint="look for this id in the gateway's log: it has the traceback",
        )
    )


def error_headers(error: AenvError) -> dict[str, str]:
    """Return the headers that belong to an error: ``Retry-After``, ``WWW-Authenticate``."""
    if error.retryable:
        after_s = error.retry_after_s if isinstance(error, CapacityExceeded) else _RETRY_S
        return {"Retry-After": str(max(1, math.ceil(after_s)))}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": 'Bearer realm="aenv"'}
    return {}


def _json(body: Mapping[str, Any], status: int, headers: Mapping[str, str] | None) -> Response:
    return Response(
        pydantic_core.to_json(body, inf_nan_mode="null", fallback=str),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )
