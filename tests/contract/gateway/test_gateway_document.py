"""The OpenAPI document matches the gateway: generated requests get only documented answers."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from aenv_ray.errors import ConfigError
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.listener import GatewayListener, listen
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.contract.gateway.gateway_bench import Bench, a_gateway

pytestmark = pytest.mark.redis

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


TOOLS_LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


class Served:
    """A gateway on a real socket, in its own thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.bench: Bench
        self.sock = listen("127.0.0.1", 0)
        self._listener = GatewayListener(self._app, [self.sock])
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.secret = ""

    @asynccontextmanager
    async def _app(self) -> AsyncIterator[ASGIApp]:
        settings = GatewaySettings(create_wait_s=5, requests_per_s=1e6, burst=10**6)
        async with a_gateway(self._root, settings) as self.bench:
            self.secret = await self.bench.token(Role.ADMIN, "root")
            yield await self.bench.gateway.open()

    def start(self) -> None:
        self._listener.start(30)

    def stop(self) -> None:
        self._listener.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    made.start()
    yield made
    made.stop()


def test_generated_requests_get_documented_answers(served: Served) -> None:
    """No 5xx, no undocumented answer."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    headers = {"Authorization": f"Bearer {served.secret}"}
    seen = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.endswith(("/events", "/logs")) or operation.path == "/pools":
            continue

        @settings(
            max_examples=10, phases=[Phase.explicit, Phase.generate], derandomize=True,
            suppress_health_check=list(HealthCheck), database=None, deadline=None,
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            nonlocal seen
            seen += 1
            if case.query and "wait_s" in case.query:
                case.query["wait_s"] = 0
            response = case.call(headers=headers, timeout=30)
            case.validate_response(response, checks=CHECKS)

        ask()
    assert seen > 100


def test_real_answers_fit_the_document(served: Served) -> None:
    """For existing objects too, not only for generated ids."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    headers = {"Authorization": f"Bearer {served.secret}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=30) as http:
        made = http.post("/env-instance", json={"envName": "probe@1.0.0"}).json()["data"]
        instance = {"id": made["id"]}
        version = {"name": "probe", "version": "1.0.0"}
        wanted = [
            ("GET", "/health", {}, None), ("GET", "/metrics", {}, None), ("GET", "/env/", {}, None),
            ("GET", "/env/{name}/{version}", version, None),
            ("GET", "/env/{name}", {"name": "probe"}, None),
            ("GET", "/env/{name}/versions", {"name": "probe"}, None),
            ("GET", "/env/{name}/{version}/exists", version, None),
            ("GET", "/env/{name}/{version}/functions", version, None),
            ("GET", "/env-instance/{id}", instance, None),
            ("GET", "/instances", {}, None),
            ("POST", "/instances/{id}/exec", instance, {"command": "true"}),
            ("POST", "/instances/{id}/renew", instance, {"ttl": "1h"}),
            ("POST", "/instances/{id}/token", instance, {}),
            ("POST", "/instances", {}, {"envName": "probe", "count": 2}),
            ("POST", "/tokens", {}, {"role": "owner", "owner": "ann"}),
            ("GET", "/tokens", {}, None), ("GET", "/quotas", {}, None), ("GET", "/hub", {}, None),
            ("GET", "/instances/{id}/info", instance, None),
            ("GET", "/instances/{id}/files/list", instance, None),
            ("POST", "/instances/{id}/mcp", instance, TOOLS_LIST),
            ("POST", "/instances/{id}/mcp", instance, {"jsonrpc": "2.0", "method": "noted"}),
            ("POST", "/instances/{id}/mcp", instance, TOOLS_LIST | {"jsonrpc": "1.0"}),
            ("DELETE", "/instances/{id}/mcp", instance, None),
            ("DELETE", "/instances/{id}", instance, None),
            ("POST", "/instances/{id}/mcp", instance, TOOLS_LIST),
            ("GET", "/env-instance/{id}", instance, None),
        ]  # fmt: skip
        for method, path, values, body in wanted:
            case = schema[path][method].Case(path_parameters=values)
            response = http.request(method, path.format(**values), json=body)
            case.validate_response(response, checks=CHECKS)


def test_every_route_is_in_the_document(served: Served) -> None:
    gateway = served.bench.gateway
    convertor = re.compile(r":\w+(?=})")
    routes = [*gateway.data_routes, *gateway.control_api.routes]
    paths = {
        convertor.sub("", route.path).replace("{instance_id}", "{id}")
        for route in routes
        if isinstance(route, Route) and route.path != "/{path:path}"  # functions choose their paths
    }
    additional = {"/functions/list"}  # has its own entry beside /functions/{path}
    assert paths | additional == set(gateway.control_api.openapi()["paths"])


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            listen("127.0.0.1", taken.getsockname()[1])
