"""The JSON envelope of every control answer, and the one table from errors to HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pydantic_core
from starlette.responses import Response

from aenv_ray.errors import AenvError, CapacityExceeded, Unauthorized, to_wire

_RETRY_S = 1
"""What a client that may try again waits, where the error does not say."""


def success(
    data: Any = None, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer that carries `data`.

    Args:
        data: What `pydantic_core.to_json` can write: models, times, plain data.
        status: HTTP status.
        headers: Added to the answer.
    """
    body = {"success": True, "code": 0, "message": "", "data": data}
    return _json(body, status, headers)


def failure(
    error: AenvError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer that carries an error.

    Args:
        error: What went wrong. It travels whole, so that a client raises the same.
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


def error_headers(error: AenvError) -> dict[str, str]:
    """Return the headers that an error asks for: when to try again, how to log in."""
    if isinstance(error, CapacityExceeded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if error.retryable:
        return {"Retry-After": str(_RETRY_S)}
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
