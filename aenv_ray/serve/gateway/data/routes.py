"""The data routes of the gateway: tools, functions, files and ports of instances."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from aenv_ray.serve.gateway.data.functions import FunctionProxy
from aenv_ray.serve.gateway.data.http import proxy_app
from aenv_ray.serve.gateway.data.mcp import McpProxy, mcp_app
from aenv_ray.serve.gateway.data.ports import PortProxy
from aenv_ray.serve.gateway.data.sandbox import SandboxProxy
from aenv_ray.serve.gateway.data.sockets import port_routes
from aenv_ray.serve.gateway.data.targets import ADDRESS_HEADER, INSTANCE_HEADER, Targets
from aenv_ray.serve.gateway.deps import Deps

_ADDRESSED: Final = frozenset({ADDRESS_HEADER.encode(), INSTANCE_HEADER.encode()})


def data_routes(deps: Deps) -> list[BaseRoute]:
    """Return the data routes; they precede the control routes.

    A request whose headers name an instance goes to that instance, whatever its path: environments
    choose the endpoints of their functions.
    """
    targets, calls = Targets(deps), deps.calls
    check_again = deps.authenticate.check_again
    limit = deps.settings.max_body_bytes
    addressed_mcp = mcp_app(McpProxy(targets.of_headers, calls, check_again), limit)
    functions = proxy_app(FunctionProxy(targets.of_headers, calls, check_again).serve, limit)
    sandbox = SandboxProxy(targets.of_path, deps.fabric, limit, check_again)
    ports = PortProxy(targets.of_path, deps)
    instance = "/instances/{instance_id}"
    return [
        _AddressedRoute("/mcp", addressed_mcp),
        _AddressedRoute("/{path:path}", functions),
        Route(f"{instance}/mcp", mcp_app(McpProxy(targets.of_path, calls, check_again), limit)),
        Route(f"{instance}/info", sandbox.info, methods=["GET"]),
        Route(f"{instance}/files/list", sandbox.list, methods=["GET"]),
        Route(f"{instance}/files", sandbox.read, methods=["GET"]),
        Route(f"{instance}/files", sandbox.write, methods=["PUT"]),
        *port_routes(instance, ports),
        # Requests without the headers: the error names the missing ones.
        Route("/mcp", addressed_mcp),
        Route("/functions/{path:path}", functions),
        Route("/task/reward", functions),
        Route("/task/reward/{path:path}", functions),
    ]


class _AddressedRoute(Route):
    """A route for requests whose headers name an instance."""

    def matches(self, scope: Scope) -> tuple[Match, Any]:
        if scope["type"] == "http" and any(name in _ADDRESSED for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}
