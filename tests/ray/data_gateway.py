"""The gateway's data side on real sockets: replicas that share a hub and a fabric, nothing else."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from starlette.requests import HTTPConnection
from starlette.routing import Router

import aenv_ray
from aenv_ray.actors.entrance import init
from aenv_ray.actors.handle import EnvHandle
from aenv_ray.clock import SystemClock
from aenv_ray.errors import InstanceNotFound, Unauthorized
from aenv_ray.hub.records import Lease, Role
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project import Project
from aenv_ray.serve.data_routes import data_routes
from aenv_ray.serve.deps import Deps, Principal
from aenv_ray.serve.http import Front, Observer
from aenv_ray.serve.instances import Instances
from aenv_ray.serve.settings import GatewaySettings

SINK = Path(__file__).parents[1] / "fixtures" / "projects" / "kitchen-sink"


class Book:
    """What the data side asks of a hub: leases, by id and by capability, and tokens."""

    def __init__(self) -> None:
        self.by_id: dict[str, Lease] = {}
        self.tokens: dict[str, Principal] = {}

    def admit(self, handle: EnvHandle, owner: str) -> Lease:
        lease = Lease(
            id=handle.instance_id, reference=handle.reference, digest="d", owner=owner,
            created_at=0.0, deadline=2e9, capability=secrets.token_hex(16),
        )  # fmt: skip
        self.by_id[lease.id] = lease
        return lease

    async def lease(self, instance_id: str) -> Lease:
        return self._found(self.by_id.get(instance_id), instance_id)

    async def lease_of_capability(self, capability: str) -> Lease:
        named = [lease for lease in self.by_id.values() if lease.capability == capability]
        return self._found(named[0] if named else None, "such an address")

    def _found(self, lease: Lease | None, what: str) -> Lease:
        if lease is None:
            raise InstanceNotFound(f"there is no {what}")
        return lease

    async def authenticate(self, request: HTTPConnection) -> Principal:
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        if secret not in self.tokens:
            raise Unauthorized("no such token")
        return self.tokens[secret]


class Reached(Instances):
    """Instances of the Ray of this process."""

    def __init__(self) -> None:
        self._handles: dict[str, EnvHandle] = {}

    async def create(
        self, source: Project, specs: Sequence[InstanceSpec], density: ActorDensity
    ) -> list[EnvHandle]:
        raise NotImplementedError

    async def handle(self, instance_id: str) -> EnvHandle:
        if instance_id not in self._handles:
            found = await asyncio.to_thread(lambda: init().get(instance_id))
            self._handles[instance_id] = found
        return self._handles[instance_id]

    async def info(self, instance_id: str) -> InstanceInfo:
        handle = await self.handle(instance_id)
        info: InstanceInfo = await handle.info.remote()
        return info

    def forget(self, instance_id: str) -> None:
        self._handles.pop(instance_id, None)

    async def release(self, instance_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def list_instances(self) -> list[InstanceInfo]:
        return aenv_ray.list_instances()


class Replica:
    """One gateway process, as far as its state is concerned, on a port of its own."""

    def __init__(self, book: Book) -> None:
        deps: Any = Deps(
            hub=book, fabric=Reached(), artifacts=None, resolve=None,  # type: ignore[arg-type]
            authenticate=book.authenticate, settings=GatewaySettings(), clock=SystemClock(),
        )  # fmt: skip
        app = Front(Router(routes=data_routes(deps)), Observer())
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([sock],), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)


class Gateway:
    """Two replicas, and an instance behind them."""

    def __init__(self) -> None:
        self.book = Book()
        self.replicas = [Replica(self.book), Replica(self.book)]
        self.url = self.replicas[0].url

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def token(self, role: Role, owner: str = "ada", instance_id: str | None = None) -> str:
        secret = secrets.token_hex(8)
        self.book.tokens[secret] = Principal(role, owner, instance_id, secret)
        return secret


class Door:
    """An instance as its owner and its agent reach it."""

    def __init__(self, gateway: Gateway, handle: EnvHandle) -> None:
        self.gateway = gateway
        self.handle = handle
        self.id = handle.instance_id
        self.lease = gateway.book.admit(handle, "ada")
        self.owner = {"authorization": f"Bearer {gateway.token(Role.OWNER)}"}
        agent = gateway.token(Role.AGENT, instance_id=self.id)
        self.agent = {"authorization": f"Bearer {agent}"}
        self.client_headers = {
            "AEnvCore-EnvInstance-ID": self.id,
            "AEnvCore-MCPProxy-URL": f"http://{self.lease.capability}:8081",
        }
        self.path = f"/instances/{self.id}"
        self.mcp_url = f"{gateway.url}{self.path}/mcp"

    def http(self, headers: dict[str, str] | None = None, replica: int = 0) -> httpx.AsyncClient:
        url = self.gateway.replicas[replica].url
        return httpx.AsyncClient(base_url=url, headers=headers or self.owner, timeout=60)

    async def rpc(
        self, method: str, params: dict[str, Any], headers: dict[str, str] | None = None
    ) -> SimpleNamespace:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self.http() as http:
            answer = await http.post(f"{self.path}/mcp", json=message, headers=headers)
        return SimpleNamespace(status=answer.status_code, body=answer.json(), answer=answer)
