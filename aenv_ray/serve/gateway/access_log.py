"""One JSON line for every request: who, what, how it ended. No body, no header, no query."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any, Final

import pydantic_core
from starlette.types import Scope

from aenv_ray.errors import AenvError
from aenv_ray.serve.gateway.http import Observer
from aenv_ray.serve.gateway.metrics import Metrics

access = logging.getLogger("aenv_ray.access")

_FLUSH_S: Final = 0.1
"""How long a line may wait for others to be written with it."""
_MOST_LINES: Final = 200
"""That wait."""
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
    """Writes the log, and counts. Use it on one event loop.

    Lines are written together: each by itself would cost more than the rest of a small request.

    Args:
        metrics: Of this replica.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lines: list[bytes] = []
        self._due: asyncio.TimerHandle | None = None

    def began(self) -> None:  # noqa: D102
        self._metrics.request_began()

    def ended(self, scope: Scope, status: int, seconds: float, sent: int) -> None:  # noqa: D102
        error = scope.get("aenv.error")
        code = error.code if isinstance(error, AenvError) else type(error).__name__
        route = route_of(scope)
        self._metrics.request_ended(route, status, seconds, code if error is not None else None)
        if access.isEnabledFor(logging.INFO):
            line = _line(scope, route, status, seconds, sent, code)
            self._lines.append(pydantic_core.to_json(line))
            if len(self._lines) >= _MOST_LINES:
                self.flush()
            elif self._due is None:
                self._due = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._lines:
            lines, self._lines = self._lines, []
            access.info("%s", b"\n".join(lines).decode(errors="replace"))


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
