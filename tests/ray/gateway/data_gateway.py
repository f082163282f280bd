"""Gateway replicas on real sockets, with a hub on a real Redis and the Ray of these tests."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp

from aenv_ray import ids
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.fabric.driver_api import init
from aenv_ray.clock import SystemClock
from aenv_ray.errors import EnvironmentNotFound
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import Lease, Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.models import InstanceStatus
from aenv_ray.project import project
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.app import GatewayApp
from aenv_ray.serve.gateway.listener import GatewayListener, listen
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.ray.faults import PROBE

SINK = Path(__file__).parents[2] / "fixtures" / "projects" / "kitchen-sink"
UP_S = 30.0

T = TypeVar("T")


class Replica:
    """One gateway process, as far as its state is concerned, on its own port."""

    def __init__(self, redis: RedisServer, projects: dict[str, Path]) -> None:
        sock = listen("127.0.0.1", 0, shared=False)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._redis = redis
        self._projects = projects
        self._listener = GatewayListener(self._open, [sock])
        self._listener.start(UP_S)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[ASGIApp]:
        self._loop = asyncio.get_running_loop()
        clock = SystemClock()
        self.hub = HubCore(self._redis.connect(), clock, where="test")
        fabric = AsyncFabric(init())
        nothing: Any = None  # publishing has tests of its own
        self.gateway = GatewayApp(
            self.hub, fabric, nothing, self._resolve, nothing, GatewaySettings(), clock=clock
        )
        yield await self.gateway.open()
        await self.gateway.close()
        await self.hub.close()

    async def _resolve(self, reference: str) -> Project:
        name, _ = ids.split_reference(reference)
        if name in self._projects:
            return project.load(self._projects[name])
        found = await asyncio.to_thread(project.resolve, reference)
        if found is None:
            raise EnvironmentNotFound(f"there is no environment {reference!r}")
        return found

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the replica's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(UP_S)

    def close(self) -> None:
        self._listener.stop()


class GatewayBench:
    """Two replicas, which know each other through the hub alone."""

    def __init__(self, root: Path) -> None:
        self._redis = RedisServer(root / "data", root / "run", linger_s=0.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._redis.ensure(), self._loop).result(UP_S)
        self.projects = {"probe": PROBE, "kitchen-sink": SINK}
        self.replicas = [Replica(self._redis, self.projects) for _ in range(2)]
        self.url = self.replicas[0].url

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        asyncio.run_coroutine_threadsafe(self._redis.end(), self._loop).result(UP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def token(self, role: Role, owner: str = "ada", instance_id: str | None = None) -> str:
        made = self.replicas[0].hub.create_token(role, owner, instance_id=instance_id)
        return self.replicas[0].run(made)[0]

    def address(self, lease: Lease) -> str:
        """Return the address of an instance, shown to a token of its owner."""
        replica = self.replicas[0]
        _, token = replica.run(replica.hub.create_token(Role.USER, lease.owner))
        return replica.run(replica.gateway.deps.signer.address(lease.capability, token.id))

    def admit(self, handle: EnvHandle, owner: str) -> Lease:
        """Account for an instance that was made beside the gateway."""
        lease = Lease(
            id=handle.instance_id, reference=handle.reference, digest="d", owner=owner,
            created_at=0.0, deadline=4e9, capability=secrets.token_hex(16),
            status=InstanceStatus.RUNNING,
        )  # fmt: skip
        self.replicas[0].run(self.replicas[0].hub.admit([lease]))
        return lease


class Door:
    """An instance as its owner and its agent reach it."""

    def __init__(self, gateway: GatewayBench, handle: EnvHandle) -> None:
        self.gateway = gateway
        self.handle = handle
        self.id = handle.instance_id
        self.lease = gateway.admit(handle, "ada")
        self.owner = {"authorization": f"Bearer {gateway.token(Role.PUBLISHER)}"}
        self.address = gateway.address(self.lease)
        agent = gateway.token(Role.AGENT, instance_id=self.id)
        self.agent = {"authorization": f"Bearer {agent}"}
        self.client_headers = {
            "AEnvCore-EnvInstance-ID": self.id,
            "AEnvCore-MCPProxy-URL": f"http://{self.address}:8081",
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
