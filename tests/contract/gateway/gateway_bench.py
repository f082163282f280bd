"""A gateway in this process: a real hub on a real Redis, a real host on the fake engine, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from aenv_ray import ids
from aenv_ray.actors.calls.call_batching import BatchServer
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.controller.draining import NodeState, NodeStatus
from aenv_ray.actors.fabric.async_fabric import GATEWAY_QUEUE_S, AsyncFabric, CreatedInstance
from aenv_ray.actors.fabric.create_protocol import OnQueue
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.node_engines import engine_refusal
from aenv_ray.clock import SystemClock
from aenv_ray.engines.fake.engine import FakeEngine
from aenv_ray.errors import (
    AenvError,
    EnvironmentNotFound,
    FabricUnavailable,
    InstanceNotFound,
)
from aenv_ray.hub import packing
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import EVERYBODY, EnvironmentVersion, Right, Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.hub.services import ServiceRecord
from aenv_ray.hub.storages import StorageRecord
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project import project
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.app import GatewayApp
from aenv_ray.serve.gateway.membership import Membership
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.services.apps import Apps, ServiceState, ServiceStatus, status_of
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.contract.hub.redis_servers import emptied

TOOLS = """
import asyncio
from aenv_ray.runtime import register_tool

@register_tool
def add(a: int, b: int) -> int:
    return a + b

@register_tool
async def wait() -> str:
    await asyncio.sleep(60)
    return "late"
"""


class _Remote:
    """What a Ray method looks like to a handle."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self._function(*args))


class LocalActor:
    """The methods of a host or a controller that handles call."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, function in methods.items():
            setattr(self, name, _Remote(function))


class LocalInstances(AsyncFabric):
    """The fabric without Ray: one host in this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        batches = BatchServer(
            lambda message, report: host.calls.call(CallMessage.decode(message), report)
        )
        self._actor = LocalActor(
            call=self._call, exchange=batches.exchange, info=host.info, renew=host.renew
        )
        self._controller = LocalActor(release=host.release)
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.failure: AenvError | None = None
        self.created: list[str] = []
        self.queues_s: list[float] = []
        """Of each create: how long it waits for room."""
        self.engines: tuple[str, ...] = ()
        """Of its node; empty: any."""

    async def _call(self, message: bytes) -> Any:
        decode, args = (await self._host.calls.call(CallMessage.decode(message))).__reduce__()
        return decode(*args)

    async def create(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        density: ActorDensity,
        *,
        queue_s: float = GATEWAY_QUEUE_S,
        on_queue: OnQueue = lambda _: None,
    ) -> list[CreatedInstance]:
        self.queues_s.append(queue_s)
        self.asked.set()
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            await self._host.put_project(source.digest, source.archive())
            infos = await self._host.start(specs)
            for info in infos:
                if isinstance(info, AenvError):
                    raise info
        except BaseException:
            await self._host.release([spec.instance_id for spec in specs])
            raise
        self.created += [spec.instance_id for spec in specs]
        return [
            CreatedInstance(self._handle(spec.instance_id, spec.reference), info)
            for spec, info in zip(specs, infos, strict=True)
            if isinstance(info, InstanceInfo)
        ]

    def _handle(self, instance_id: str, reference: str) -> EnvHandle:
        return EnvHandle(InstanceId(instance_id), reference, self._actor, self._controller)

    async def handle(self, instance_id: str) -> EnvHandle:
        info = await self.info(instance_id)
        if info.status != "Running":
            raise InstanceNotFound(f"{instance_id} has ended", instance_id=instance_id)
        return self._handle(instance_id, info.reference)

    async def info(self, instance_id: str) -> InstanceInfo:
        return await self._host.info(InstanceId(instance_id))

    def forget(self, instance_id: str) -> None:
        pass

    async def release(self, instance_ids: Sequence[str]) -> None:
        await self._host.release([InstanceId(i) for i in instance_ids])

    async def check_engines(self, engines: Sequence[str]) -> None:
        refusal = engine_refusal(engines, [self.engines])
        if refusal is not None:
            raise refusal

    async def pools(self) -> dict[str, int]:
        return self._host.pools()

    async def list_instances(self) -> list[InstanceInfo]:
        return await self._host.instances()

    async def nodes(self) -> list[NodeState]:
        return [NodeState("n" * 56, "machine-1", NodeStatus.READY, 0, 0)]


class FakeApps(Apps):
    """Applications of services without Serve: what is deployed runs at once."""

    def __init__(self) -> None:
        self.deployed: dict[str, ServiceRecord] = {}
        self.failure: str | None = None
        self.broken_by = ""
        """A variable with which no environment is healthy."""

    def deploy(self, record: ServiceRecord, *, wait: bool) -> None:
        del wait
        self.deployed[record.id] = record

    def delete(self, service_id: str, *, wait: bool) -> None:
        del wait
        self.deployed.pop(service_id, None)

    def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:
        return [self._state(record) for record in records]

    def _state(self, record: ServiceRecord) -> ServiceState:
        if record.id not in self.deployed:
            return ServiceState(status=ServiceStatus.TERMINATED)
        failure = self.failure
        if self.broken_by in self.deployed[record.id].environment_variables:
            failure = f"{self.broken_by} is set"
        if failure is not None:
            return ServiceState(
                status=ServiceStatus.FAILED, target_replicas=record.replicas, reason=failure
            )
        return ServiceState(
            status=status_of("RUNNING", record.replicas, record.replicas),
            available_replicas=record.replicas,
            target_replicas=record.replicas,
        )


class FakeStorageNodes:
    """Places of storage without machines: what is deleted is noted, unless they are away."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.is_away = False

    async def delete(self, record: StorageRecord) -> None:
        if self.is_away:
            raise FabricUnavailable("its machine is away")
        self.deleted.append(record.name)


class Bench:
    """One gateway with tokens of everybody."""

    def __init__(
        self,
        gateway: GatewayApp,
        hub: HubCore,
        fabric: LocalInstances,
        apps: FakeApps,
        storage_nodes: FakeStorageNodes,
    ) -> None:
        self.gateway = gateway
        self.apps = apps
        self.storage_nodes = storage_nodes
        self.hub = hub
        self.fabric = fabric

    async def token(self, role: Role, owner: str, instance_id: str | None = None) -> str:
        secret, _ = await self.hub.create_token(role, owner, instance_id=instance_id)
        return secret

    @asynccontextmanager
    async def owner(self, name: str) -> AsyncIterator[httpx.AsyncClient]:
        async with self.client(await self.token(Role.PUBLISHER, name)) as http:
            yield http

    @asynccontextmanager
    async def client(self, secret: str | None) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        transport = httpx.ASGITransport(self.gateway.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway:8080", headers=headers, timeout=30
        ) as http:
            yield http


@asynccontextmanager
async def a_gateway(
    root: Path, settings: GatewaySettings | None = None, redis: RedisServer | None = None
) -> AsyncIterator[Bench]:
    """Run a gateway with the environment ``probe@1.0.0`` published.

    Args:
        root: Empty.
        settings: The gateway's.
        redis: Runs already; what is in it is deleted. None: one of its own.
    """
    source = _written(root / "probe")
    server = redis or RedisServer(root / "data", root / "run", linger_s=0.0)
    await server.ensure()
    await emptied(server)
    clock = SystemClock()
    hub = HubCore(server.connect(), clock, where="test")
    engine = FakeEngine(HostId("aenv-host-n-0"))
    host = Host(
        HostId("aenv-host-n-0"), node_id="n", density=ActorDensity.SHARED,
        make_engine=lambda _: engine, store=MemoryInstanceStore(), projects_dir=root / "projects",
    )  # fmt: skip
    await host.open()
    fabric = LocalInstances(host)

    async def resolve(reference: str) -> Project:
        name, version = ids.split_reference(reference)
        if name != "probe" or version not in {None, "1.0.0"}:
            raise EnvironmentNotFound(f"there is no environment {reference!r}")
        return source

    await hub.push(
        EnvironmentVersion(
            name="probe", version="1.0.0", digest=source.digest, archive="a" * 64,
            archive_bytes=1, config={"name": "probe"}, owner="ann", description="A probe",
        )
    )  # fmt: skip
    await hub.grant("probe", EVERYBODY, Right.USE)
    artifacts = ArtifactStore(DirectoryFiles(root / "artifacts", clock))

    async def publish(
        archive: Path,
        owner: str,
        *,
        is_admin: bool,
        artifact_quota_bytes: int | None,
        allow: Sequence[str] = (),
    ) -> EnvironmentVersion:
        found = packing.unpack_any(archive, root / "projects")
        package = packing.pack(found, allow=allow)
        size = len(package.data)
        await hub.keep_artifact(owner, package.sha256, size, artifact_quota_bytes)
        await artifacts.put(package.data, digest=package.sha256)
        return await hub.push(
            EnvironmentVersion(
                name=found.config.name, version=found.config.version, digest=found.digest,
                archive=package.sha256, archive_bytes=len(package.data), owner=owner,
                config=found.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
            ),
            is_admin=is_admin,
        )  # fmt: skip

    apps, storage_nodes = FakeApps(), FakeStorageNodes()
    gateway = GatewayApp(
        hub, fabric, artifacts, resolve, publish, settings or GatewaySettings(), clock=clock,
        apps=apps, delete_storage=storage_nodes.delete,
    )  # fmt: skip
    bench = Bench(gateway, hub, fabric, apps, storage_nodes)
    try:
        yield bench
    finally:
        await gateway.close()
        live = [info.id for info in await fabric.list_instances()]
        await host.release(live)
        await host.close()
        await engine.close()
        await hub.close()
        artifacts.close()
        if redis is None:
            await server.end()


def _written(root: Path) -> Project:
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text(
        '{"name": "probe", "deployConfig": {"network": "host", "engine": "fake"}}'
    )
    (root / "src" / "tools.py").write_text(TOOLS)
    return project.load(root)


def hears_regularly(membership: Membership) -> None:
    """Let the silence of other replicas count, as it does some time after the start."""
    membership._regular_since = 0.0


CREATE = {"envName": "probe@1.0.0"}


async def created(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/env-instance", json=CREATE | fields)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()["data"]
    return data
