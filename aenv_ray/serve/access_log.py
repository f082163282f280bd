"""One JSON line for every request: who, what, how it ended. No body, no header, no query."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Final

from starlette.types import Scope

from aenv_ray.errors import AenvError
from aenv_ray.serve.http import Observer
from aenv_ray.serve.metrics import Metrics

access = logging.getLogger("aenv_ray.access")

_MOST_CHARACTERS: Final = 200
_DATA: Final = ("/mcp", "/ports/", "/files", "/functions", "/task/reward", "/health")
"""Kinds of routes of the data side, by what is in the path; a function may have any other."""


def write_to_stderr() -> None:
    """Have the lines written to this process's standard error, which Ray keeps."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]
    access.propagate = False
    access.setLevel(logging.INFO)


class AccessLog(Observer):
    """Writes the log, and counts.

    Args:
        metrics: Of this replica.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def began(self) -> None:  # noqa: D102
        self._metrics.request_began()

    def ended(self, scope: Scope, status: int, seconds: float, sent: int) -> None:  # noqa: D102
        error = scope.get("aenv.error")
        code = error.code if isinstance(error, AenvError) else type(error).__name__
        route = route_of(scope)
        self._metrics.request_ended(route, status, seconds, code if error is not None else None)
        if access.isEnabledFor(logging.INFO):
            access.info(json.dumps(_line(scope, route, status, seconds, sent, code)))


def route_of(scope: Scope) -> str:
    """Return method and template of a request's route: few, whatever clients ask for."""
    noted = scope.get("aenv.route")
    if noted is not None:
        return str(noted)
    if scope.get("endpoint") is None:
        return "none"
    path = str(scope["path"])
    return f"data {next((kind for kind in _DATA if kind in path), 'function')}"


def _line(
    scope: Scope, route: str, status: int, seconds: float, sent: int, code: str
) -> dict[str, Any]:
    principal = scope.get("aenv.principal")
    line = {
        "request_id": scope.get("aenv.request_id"),
        "route": route,
        "path": scope["path"][:_MOST_CHARACTERS],
        "status": status,
        "ms": round(seconds * 1000, 2),
        "bytes": sent,
    }
    if principal is not None:
        line |= {"token": principal.token_id, "owner": principal.owner}
    if scope.get("aenv.error") is not None:
        line["error"] = code
    return line
