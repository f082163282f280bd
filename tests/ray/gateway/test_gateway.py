"""The gateway on a real Serve: both ports, many clients, and what dies under them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import aenv_ray
from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.client import Environment
from aenv_ray.clock import SystemClock
from aenv_ray.config import settings
from aenv_ray.errors import AenvError, ConfigError, PolicyRefused, from_wire
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import blocking
from aenv_ray.hub.records import LeaseQuery, Role
from aenv_ray.hub.redis import keeper as redis_keeper
from aenv_ray.project import project
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.deployment import deploy, is_deployed, undeploy
from aenv_ray.serve.gateway.listener import listen
from aenv_ray.serve.gateway.membership import Membership
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.gateway.sweep import Sweep
from tests.conftest import require
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import actor_pid, eventually, kill, processes_of

pytestmark = pytest.mark.redis

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
CREATE = {"envName": "mini-terminal", "ttl": "10m"}
CLIENTS = 50
INSTANCES = 200
GROUP_S = 200.0
"""For everything that one test's clients do."""


@dataclass(frozen=True)
class Door:
    """A deployed gateway."""

    settings: GatewaySettings
    secret: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def mcp_url(self) -> str:
        return f"http://127.0.0.1:{self.settings.mcp_port}"

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.secret}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def door(cluster: Cluster) -> Iterator[Door]:
    from ray import serve

    del cluster
    gateway = GatewaySettings(port=free_port(), mcp_port=free_port(), replicas=2, sweep_s=1.0)
    deploy(gateway)
    secret, _ = blocking(hub_actor.ensure_hub().create_token(Role.ADMIN, "root"))
    yield Door(gateway, secret)
    undeploy()
    assert not is_deployed()
    (newest,) = blocking(hub_actor.ensure_hub().audit_log(1))
    assert (newest.action, newest.detail) == ("policy", {"policy": "withdrawn"})
    serve.shutdown()
    hub_actor.end_hub()


@pytest.fixture(autouse=True)
def before_the_test(door: Door, request: pytest.FixtureRequest) -> None:
    """The gateway is there before `nothing_left` counts."""


def replica_pids(root: Path) -> list[int]:
    title = "ray::ServeReplica:aenv-gateway"
    return [pid for pid, command in processes_of(root).items() if command.startswith(title)]


def test_the_walk_through_of_the_docs_works(door: Door, tmp_path: Path) -> None:
    require("curl", shutil.which("curl") is not None, "curl is not installed")
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    script = "set -euo pipefail\n" + "".join(f"{block}\necho\n" for block in blocks)
    values = {"GATEWAY": door.url, "MCP": door.mcp_url, "TOKEN": door.secret}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | values, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "from-a-tool" in done.stdout
    assert "from-exec" in done.stdout
    assert door.secret not in done.stdout


def test_aenvironments_headers_reach_the_instance_on_the_data_port(door: Door) -> None:
    headers = {"Authorization": f"Bearer {door.secret}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=60) as http:
        made = http.post("/env-instance", json=CREATE).json()["data"]
        addressed = {
            "AEnvCore-MCPProxy-URL": f"http://{made['ip']}:8081",
            "AEnvCore-EnvInstance-ID": made["id"],
        }
        health = httpx.get(f"{door.mcp_url}/health", headers=addressed, timeout=60)
        assert health.json()["data"]["status"] == "healthy"
        forged = addressed | {"AEnvCore-MCPProxy-URL": "http://127.0.0.1:8081"}
        refused = httpx.get(f"{door.mcp_url}/health", headers=forged, timeout=60)
        assert refused.status_code == 404
        assert http.delete(f"/env-instance/{made['id']}").status_code == 200


def test_ray_code_follows_the_policy_of_the_gateways_operator(door: Door, tmp_path: Path) -> None:
    """Hosts refuse what the policy forbids, also to callers that skip the gateway."""
    del door
    config = {"name": "rooted", "deployConfig": {"container": {"capAdd": ["SYS_ADMIN"]}}}
    (tmp_path / "src").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyRefused) as caught:
        aenv_ray.create(tmp_path, actor="shared")
    assert "AENV_ALLOW_CAPABILITIES" in str(caught.value.hint)
    log = blocking(hub_actor.ensure_hub().audit_log(100))
    policies = [one for one in log if one.action == "policy"]
    assert policies[0].detail["capabilities"] == "[]"


def test_instances_from_a_warm_pool_have_the_id_of_the_answer(door: Door) -> None:
    headers = {"Authorization": f"Bearer {door.secret}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=100) as http:
        pool = {"environment": "mini-terminal", "count": 1}
        assert http.put("/pools", json=pool).json()["data"]["count"] == 1
        assert aenv_ray.warm("mini-terminal", 1, wait=True, lifetime="detached") >= 1
        (shown,) = http.get("/pools").json()["data"]
        assert (shown["count"], shown["ready"]) == (1, 1)
        made = http.post("/env-instance", json=CREATE).json()["data"]
        path = f"/instances/{made['id']}"
        ran = http.post(f"{path}/exec", json={"command": "echo hi"}).json()["data"]
        assert ran["stdout"] == "hi\n"
        assert http.get(f"{path}/logs").status_code == 200
        assert http.post(f"{path}/renew", json={"ttl": "1h"}).status_code == 200
        asyncio.run(swept())
        assert http.get(path).json()["data"]["status"] == "Running"
        assert http.delete(path).status_code == 200
        assert http.put("/pools", json=pool | {"count": 0}).status_code == 200
        assert http.get("/pools").json()["data"] == []


def test_a_followed_log_ends_with_its_instance(door: Door) -> None:
    async def run() -> None:
        async with door.client() as http:
            made = (await http.post("/env-instance", json=CREATE)).json()["data"]
            path = f"/instances/{made['id']}"
            async with http.stream("GET", f"{path}/logs?follow=true") as answer:
                assert answer.status_code == 200
                assert (await http.delete(path)).status_code == 200
                async for _ in answer.aiter_text():
                    pass
            assert (await http.get(f"{path}/logs?follow=true")).status_code == 404

    asyncio.run(run())


@pytest.mark.timeout(GROUP_S + 60)
def test_200_instances_by_50_clients_without_an_error(door: Door) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        for _ in range(INSTANCES // CLIENTS):
            made = await http.post("/env-instance", json=CREATE)
            assert made.status_code == 200, made.text
            data = made.json()["data"]
            assert data["status"] == "Running", data
            call = {
                "jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "execute_command", "arguments": {"command": "echo hi"}},
            }  # fmt: skip
            accept = {"Accept": "application/json, text/event-stream"}
            answer = await http.post(f"/instances/{data['id']}/mcp", json=call, headers=accept)
            assert answer.status_code == 200, answer.text
            assert answer.json()["result"]["isError"] is False, answer.text
            ended = await http.delete(f"/env-instance/{data['id']}")
            assert ended.status_code == 200, ended.text

    async def run() -> None:
        async with asyncio.timeout(GROUP_S), asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(_with_client(door, work))

    asyncio.run(run())
    assert blocking(hub_actor.ensure_hub().leases(LeaseQuery())).total == 0


@pytest.mark.timeout(GROUP_S + 60)
def test_creates_survive_kills_without_duplicates(door: Door, cluster: Cluster) -> None:
    """Invariants 3 and 5: a replica, the hub and Redis are killed; keys make repeats safe."""
    made: dict[str, set[str]] = {}
    strikes: list[Callable[[], None]] = [
        lambda: kill(replica_pids(cluster.root)[0]), kill_hub, kill_redis,
    ]  # fmt: skip
    done = 0

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal done
        for _ in range(3):
            key = uuid.uuid4().hex
            headers = {"Idempotency-Key": key}
            answer = await patiently(http, "POST", "/instances", json=CREATE, headers=headers)
            # The answer might have been lost: whoever repeats it gets the same.
            again = await patiently(http, "POST", "/instances", json=CREATE, headers=headers)
            made[key] = {one["id"] for a in (answer, again) for one in a.json()["data"]}
            for instance_id in made[key]:
                await patiently(http, "DELETE", f"/instances/{instance_id}", gone=True)
            done += 1
            if done in (5, 15, 25):
                await asyncio.to_thread(strikes.pop(0))

    async def run() -> None:
        async with asyncio.timeout(GROUP_S), asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(_with_client(door, work))

    asyncio.run(run())
    assert len(made) == 36
    assert all(len(ids) == 1 for ids in made.values())
    assert strikes == []
    hub = hub_actor.ensure_hub()
    eventually(lambda: not blocking(hub.leases(LeaseQuery())).total, 60.0)
    eventually(lambda: len(replica_pids(cluster.root)) == 2, 60.0)


@pytest.mark.timeout(GROUP_S + 60)
def test_a_call_survives_the_death_of_its_replica(door: Door, cluster: Cluster) -> None:
    """Invariant 1: its caller gets the result, or an error that may be retried; it ran once."""
    command = "echo x >> /tmp/ran; until [ -e /tmp/go ]; do sleep 0.1; done; wc -l < /tmp/ran"

    async def run() -> None:
        env = Environment("mini-terminal", aenv_url=door.url, api_key=door.secret, ttl="10m")
        await env.initialize()
        assert env.instance_id is not None
        handle = aenv_ray.get(env.instance_id)

        async def sh(line: str) -> Any:
            return await handle.exec.remote(["sh", "-c", line])

        call = asyncio.create_task(
            env.call_tool("execute_command", {"command": command, "timeout": 150}, timeout=150)
        )
        async with asyncio.timeout(GROUP_S):
            began = "until [ -s /tmp/ran ]; do sleep 0.1; done"
            assert (await sh(began)).exit_code == 0
            signal_all(replica_pids(cluster.root))
            await sh("touch /tmp/go")
            await asyncio.wait({call})
            failure = call.exception()
            if failure is None:
                assert call.result().data["output"][0].strip() == "1"
            else:
                assert isinstance(failure, AenvError)
                assert failure.retryable
            assert (await sh("cat /tmp/ran")).text() == "x\n"
            await asyncio.to_thread(eventually, is_back, 120.0)
            await env.release()

    def is_back() -> bool:
        try:
            is_up = httpx.get(f"{door.url}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False
        return is_up and len(replica_pids(cluster.root)) == 2

    asyncio.run(run())


def test_a_port_that_is_in_use_is_an_error(door: Door) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        listen("127.0.0.1", door.settings.port, shared=False)


# --- helpers -------------------------------------------------------------------------------------


async def swept() -> None:
    """Compare leases with what runs, once, as a replica does."""
    hub, fabric, clock = hub_actor.ensure_hub(), AsyncFabric(driver_api.init()), SystemClock()
    membership = Membership(hub, clock, "test", 1.0)
    creator = Creator(hub, fabric, project.resolve, clock, membership, lambda *_: None)
    await Sweep(hub, fabric, creator, membership, 1.0, lambda _: None, lambda _: None).once()


async def _with_client(door: Door, work: Any) -> None:
    async with door.client() as http:
        await work(http)


async def patiently(
    http: httpx.AsyncClient, method: str, path: str, *, gone: bool = False, **options: Any
) -> httpx.Response:
    """Return an answer; a broken connection or a retryable error is tried again, nothing else."""
    while True:
        try:
            answer = await http.request(method, path, **options)
        except httpx.TransportError:
            await asyncio.sleep(0.2)
            continue
        if answer.status_code == 200 or (gone and answer.status_code == 404):
            return answer
        error = from_wire(answer.json()["error"])
        assert error.retryable, answer.text
        assert "retry-after" in answer.headers
        await asyncio.sleep(0.2)


def kill_hub() -> None:
    kill(actor_pid(ray_api.find_actor(ray_api.HUB_NAME)))


def kill_redis() -> None:
    """Kill the Redis of now: a hub that was away for long has another keeper."""
    lock = settings().data_dir / "hub" / redis_keeper.KEEPER_LOCK

    def is_killed() -> bool:
        try:
            keeper = int(lock.read_text())
            children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
            kill(int(children[0]))
        except (OSError, ValueError, IndexError):
            return False
        return True

    eventually(is_killed, 60.0)
