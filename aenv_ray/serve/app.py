"""The gateway's application: all routes, behind one front."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from aenv_ray.serve.deps import Deps
from aenv_ray.serve.envelope import success
from aenv_ray.serve.http import Front, Observer


def build_app(deps: Deps) -> ASGIApp:
    """Return the ASGI application that serves both ports."""
    return Front(Router(routes=_routes(deps)), Observer())


def _routes(deps: Deps) -> list[BaseRoute]:
    del deps
    return [Route("/health", _health, methods=["GET"])]


async def _health(request: Request) -> Response:
    del request
    return success({"status": "healthy"})
