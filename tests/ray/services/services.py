"""Helpers for tests of services: their state, and load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import ray

import aenv_ray
from aenv_ray import serve as services
from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import blocking
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway.deployment import deploy, undeploy
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.services.apps import DEPLOYMENT, ServiceStatus, app_name
from aenv_ray.serve.services.service_replica import SERVICE_LABEL
from tests.ray.faults import eventually

ACCEPT = {"Accept": "application/json, text/event-stream"}
WIDE_S = 180.0
"""Seconds; generous for a busy machine."""


def sandboxes(service: str) -> list[str]:
    """Return the ids of a service's sandboxes."""
    return [
        info.id for info in aenv_ray.list_instances() if info.labels.get(SERVICE_LABEL) == service
    ]


def call(handle: Any, name: str, **arguments: Any) -> Any:
    result = handle.call_tool.remote(name, arguments).result(timeout_s=WIDE_S)
    assert not result.is_error, result
    return result.structured["result"]


def settled(service: str, replicas: int) -> None:
    """Wait until a service has exactly this many healthy replicas."""

    def is_settled() -> bool:
        state = services.state(service)
        return (
            state.status is ServiceStatus.RUNNING
            and state.available_replicas == replicas
            and len(sandboxes(service)) == replicas
        )

    eventually(is_settled, WIDE_S, lambda: (services.state(service), sandboxes(service)))


def replicas_of(service: str) -> list[Any]:
    """Return the actors of a service's replicas."""
    prefix = f"SERVE_REPLICA::{app_name(service)}#{DEPLOYMENT}#"
    named = ray.util.list_named_actors(all_namespaces=True)
    return [
        ray.get_actor(one["name"], namespace=one["namespace"])
        for one in named
        if one["name"].startswith(prefix)
    ]


@dataclass(frozen=True)
class ServiceGateway:
    """A deployed gateway, with the token of an owner."""

    settings: GatewaySettings
    token: str
    http: httpx.Client
    """Of its data port."""


@contextmanager
def a_gateway() -> Iterator[ServiceGateway]:
    """Deploy a gateway; afterwards shut down Serve and the hub."""
    from ray import serve

    settings = GatewaySettings(port=free_port(), mcp_port=free_port())
    with ExitStack() as started:
        for end in (hub_actor.end_hub, serve.shutdown, undeploy):
            started.callback(end)
        deploy(settings)
        token, _ = blocking(hub_actor.ensure_hub().create_token(Role.PUBLISHER, "ann"))
        url = f"http://127.0.0.1:{settings.mcp_port}"
        headers = {"Authorization": f"Bearer {token}"}
        http = started.enter_context(httpx.Client(base_url=url, headers=headers, timeout=WIDE_S))
        yield ServiceGateway(settings, token, http)


@contextmanager
def load(gateway: httpx.Client, service: str) -> Iterator[list[Any]]:
    """Call a service about fifty times a second, four at a time; yield the failures."""
    wrong: list[Any] = []
    done = threading.Event()
    calls = []

    def one() -> None:
        message = {
            "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": "greeting", "arguments": {}},
        }  # fmt: skip
        while not done.wait(0.06):
            answer = gateway.post(f"/services/{service}/mcp", json=message, headers=ACCEPT)
            calls.append(answer.status_code)
            if answer.status_code != 200 or "result" not in answer.json():
                wrong.append(answer.text)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(one) for _ in range(4)]
        try:
            yield wrong
        finally:
            done.set()
        for each in running:
            each.result(WIDE_S)
    assert len(calls) > 8
