"""Instances over the gateway after their creation: calls, lists, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.errors import AenvError
from aenv_ray.hub.records import LeaseQuery
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.creation import Creation, Creator
from aenv_ray.serve.gateway.membership import Membership
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.contract.gateway.gateway_bench import Bench, a_gateway, created, hears_regularly

pytestmark = pytest.mark.redis


# --- living --------------------------------------------------------------------------------------


async def test_renew_exec_and_logs(ann: httpx.AsyncClient) -> None:
    made = await created(ann, ttl="10m")
    assert made["ttl"] == "600s"  # as asked, however long it took to make
    path = f"/instances/{made['id']}"
    renewed = (await ann.post(f"{path}/renew", json={"ttl": "2h"})).json()["data"]
    assert renewed["deadline"] > made["deadline"]
    ran = (await ann.post(f"{path}/exec", json={"command": ["echo", "hi"]})).json()["data"]
    assert (ran["exit_code"], ran["stdout"], ran["encoding"]) == (0, "hi\n", "utf-8")
    raw = (await ann.post(f"{path}/exec", json={"command": "printf '\\377'"})).json()["data"]
    assert (raw["stdout"], raw["encoding"]) == ("/w==", "base64")
    late = await ann.post(f"{path}/exec", json={"command": "sleep 60", "timeout": 0.2})
    assert late.status_code == 504


async def test_lists_have_pages_and_filters(ann: httpx.AsyncClient, bench: Bench) -> None:
    for n in range(3):
        await created(ann, labels={"n": str(n)})
    page = await ann.get("/instances?limit=2")
    assert page.headers["x-total-count"] == "3"
    rest = await ann.get("/instances", params={"limit": 2, "cursor": page.headers["x-next-cursor"]})
    assert "x-next-cursor" not in rest.headers
    assert len({i["id"] for i in page.json()["data"] + rest.json()["data"]}) == 3
    for query, count in [("label=n=1", 1), ("status=Running", 3), ("env=other", 0)]:
        assert len((await ann.get(f"/instances?{query}")).json()["data"]) == count


async def test_only_administrators_set_quotas_and_see_the_hub(
    ann: httpx.AsyncClient, admin: httpx.AsyncClient
) -> None:
    assert (await ann.put("/quotas/owner:ann", json={"max_instances": 9})).status_code == 403
    assert (await admin.put("/quotas/owner:ann", json={"max_instances": 9})).status_code == 200
    assert (await admin.put("/quotas/owner:bob", json={"max_instances": 1})).status_code == 200
    label = "/quotas/label:path=a%2Fb"
    assert (await admin.put(label, json={"max_instances": 1})).status_code == 200
    assert (await admin.delete(label)).status_code == 200
    assert (await admin.put("/quotas/ann", json={"max_instances": 9})).status_code == 400
    await created(ann)
    assert (await ann.get("/quotas")).json()["data"] == [
        {"subject": "owner:ann", "instances": 1, "max_instances": 9}
    ]
    assert (await admin.delete("/quotas/owner:ann")).status_code == 200
    assert (await ann.get("/hub")).status_code == 403
    assert (await admin.get("/hub")).json()["data"]["redis_version"]


# --- endings -------------------------------------------------------------------------------------


async def test_no_lease_outlives_its_instance(bench: Bench, ann: httpx.AsyncClient) -> None:
    made = await created(ann)
    await bench.gateway.sweep.once()
    assert (await bench.hub.lease(made["id"])).status is InstanceStatus.RUNNING
    await bench.fabric.release([made["id"]])  # by Ray code, behind the gateway's back
    shown = (await ann.get(f"/instances/{made['id']}")).json()["data"]
    assert shown["status"] == "Terminated"
    await bench.gateway.sweep.once()
    assert (await ann.get(f"/instances/{made['id']}")).status_code == 404


async def test_creates_of_a_dead_replica_are_ended(root: Path) -> None:
    """Their client got no answer, and may repeat the create with its key."""
    async with a_gateway(root, GatewaySettings(create_wait_s=0, sweep_s=60)) as bench:
        await bench.gateway.membership.heartbeat()
        hears_regularly(bench.gateway.membership)
        async with bench.owner("ann") as http:
            made = await created(http)
            lease = await bench.hub.lease(made["id"])
            orphan = lease.model_copy(
                update={
                    "id": "probe-orphan22", "made_by": "gateway-dead", "capability": "iorphan",
                    "status": InstanceStatus.PENDING,
                }
            )  # fmt: skip
            await bench.hub.admit([orphan])
            await bench.gateway.sweep.once()
            found = await bench.hub.leases(LeaseQuery())
    assert [one.id for one in found.items] == [made["id"]]


async def test_an_idempotency_key_outlives_the_replica_that_claimed_it(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """The repeat makes another instance, and what the first one makes too late ends at once."""
    deps = bench.gateway.deps
    others = Membership(bench.hub, deps.clock, "dead", 1.0)
    dead = Creator(bench.hub, bench.fabric, deps.resolve, deps.clock, others, lambda *_: None)
    bench.fabric.gate.clear()
    options = CreateOptions(
        actor="shared", lifetime="detached", owner="ann", engine=None, idle_timeout=None
    )
    first = asyncio.create_task(dead.create_once(Creation("probe", options, 1, "ann"), "k", 60))
    await bench.fabric.asked.wait()
    hears_regularly(bench.gateway.membership)
    await bench.gateway.sweep.once()
    key = {"Idempotency-Key": "k"}
    repeat = asyncio.create_task(ann.post("/instances", json={"envName": "probe"}, headers=key))
    bench.fabric.gate.set()
    answer = await repeat
    assert answer.status_code == 200, answer.text
    with pytest.raises(AenvError):
        await first
    (lease,) = (await bench.hub.leases(LeaseQuery())).items
    assert lease.id == answer.json()["data"][0]["id"]
    assert [info.id for info in await bench.fabric.list_instances()] == [lease.id]


async def test_an_instance_that_is_released_while_it_starts_is_not_left(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease has ended when it is made, so the sweep does not know it."""

    async def overtake(ids: Sequence[str]) -> None:
        """Come to the host before the start does."""

    bench.fabric.gate.clear()
    creator = bench.gateway.creator
    options = CreateOptions(
        actor="shared", lifetime="detached", owner="ann", engine=None, idle_timeout=None
    )
    (lease,) = await creator.create(Creation("probe", options, 1, "ann"), 0.0)
    await bench.fabric.asked.wait()
    with monkeypatch.context() as patch:
        patch.setattr(bench.fabric, "release", overtake)
        assert (await ann.delete(f"/instances/{lease.id}")).status_code == 200
    bench.fabric.gate.set()
    await asyncio.wait(creator._tasks)
    assert await bench.fabric.list_instances() == []


async def test_polling_an_instance_asks_the_hub_for_its_environment_once(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AEnvironment's client looks every two seconds, of thousands of instances."""
    made, asked, environment = await created(ann), [], bench.hub.environment

    async def counted(*reference: str) -> Any:
        asked.append(reference)
        return await environment(*reference)

    monkeypatch.setattr(bench.hub, "environment", counted)
    for _ in range(3):
        shown = (await ann.get(f"/instances/{made['id']}")).json()["data"]
        assert shown["env"]["description"] == "A probe"
    assert len(asked) <= 1
