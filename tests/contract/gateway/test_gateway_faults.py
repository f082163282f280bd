"""A gateway whose hub loses answers, whose other replicas die, and whose hosts do not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from aenv_ray.clock import SystemClock
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.records import KeyGroup, LeaseQuery
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway import membership
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.contract.gateway.gateway_bench import Bench, a_gateway, hears_regularly
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis
KEY = {"Idempotency-Key": "k"}
WISH = {"envName": "probe"}


@pytest.fixture
async def bench(
    tmp_path_factory: pytest.TempPathFactory, module_redis: RedisServer
) -> AsyncIterator[Bench]:
    root = tmp_path_factory.mktemp("g")
    async with a_gateway(root, GatewaySettings(sweep_s=60), module_redis) as found:
        yield found


@pytest.fixture
async def ann(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("ann") as http:
        yield http


def lose_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Let the hub remember what begins with `prefix`, and its first answer be lost."""
    remember, lost = bench.hub.remember, []

    async def losing(key: str, value: str, ttl_s: float, *group: KeyGroup) -> str:
        kept = await remember(key, value, ttl_s, *group)
        if key.startswith(prefix) and not lost:
            lost.append(key)
            raise FabricUnavailable("the hub did not answer 'remember' within 20 s")
        return kept

    monkeypatch.setattr(bench.hub, "remember", losing)


@pytest.mark.parametrize("lost", ["create:", "admission:"])
async def test_a_claim_whose_answer_was_lost_frees_its_key(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    lose_answer(bench, monkeypatch, lost)
    first = await ann.post("/instances", json=WISH, headers=KEY)
    assert first.status_code == 503
    again = await ann.post("/instances", json=WISH, headers=KEY)
    assert again.status_code == 200, again.text
    (lease,) = (await bench.hub.leases(LeaseQuery())).items
    assert lease.id == again.json()["data"][0]["id"]
    assert [info.id for info in await bench.fabric.list_instances()] == [lease.id]


async def test_a_claim_of_a_dead_replica_frees_its_key(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica died before the hub admitted anything, so there is nothing to undo."""
    keys = bench.gateway.creator.keys
    monkeypatch.setattr(membership, "MIN_SILENCE_S", 0.0)
    dead = membership.Membership(bench.hub, SystemClock(), "dead", 0.0)
    monkeypatch.setattr(keys, "_membership", dead)
    claim: dict[str, Any] = {}
    remember = bench.hub.remember

    async def noting(key: str, value: str, ttl_s: float, *group: KeyGroup) -> str:
        if key.startswith("create:"):
            claim.update(json.loads(value))
            await remember(key, value, ttl_s, *group)
            raise asyncio.CancelledError
        return await remember(key, value, ttl_s, *group)

    with monkeypatch.context() as patch:
        patch.setattr(bench.hub, "remember", noting)
        with pytest.raises(asyncio.CancelledError):
            await ann.post("/instances", json=WISH, headers=KEY)
    assert claim["by"] == "dead"
    clock = FakeClock(SystemClock().now())
    mine = membership.Membership(bench.hub, clock, bench.gateway.replica, 0.0)
    hears_regularly(mine)
    monkeypatch.setattr(keys, "_membership", mine)
    answer = await ann.post("/instances", json=WISH, headers=KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["id"] not in claim["ids"]


async def test_a_failed_create_is_answered_while_the_hub_is_down(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves is undone after the answer."""
    lose_answer(bench, monkeypatch, "admission:")
    back, undone = asyncio.Event(), asyncio.Event()
    end_leases = bench.hub.end_leases

    async def late(ids: Any) -> None:
        await back.wait()
        await end_leases(ids)
        undone.set()

    monkeypatch.setattr(bench.hub, "end_leases", late)
    async with asyncio.timeout(25):
        answer = await ann.post("/instances", json=WISH, headers=KEY)
    assert answer.status_code == 503
    back.set()
    async with asyncio.timeout(25):
        await undone.wait()
    assert not (await bench.hub.leases(LeaseQuery())).total


async def test_instances_of_an_unresponsive_host_are_not_ended(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await ann.post("/env-instance", json=WISH)).json()["data"]

    async def silent(*_: Any) -> Any:
        raise FabricUnavailable("host h does not answer")

    async def nothing() -> list[Any]:
        return []

    with monkeypatch.context() as patch:
        patch.setattr(bench.fabric, "list_instances", nothing)
        patch.setattr(bench.fabric, "info", silent)
        await bench.gateway.sweep.once()
        assert (await bench.hub.lease(made["id"])).status is InstanceStatus.RUNNING
    assert (await ann.delete(f"/instances/{made['id']}")).status_code == 200


async def test_instances_of_a_replica_without_heartbeats_are_not_ended(
    bench: Bench, ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance was Pending when it was listed, but runs by now."""
    made = (await ann.post("/env-instance", json=WISH)).json()["data"]
    leases = bench.hub.leases

    async def old(query: LeaseQuery) -> Any:
        page = await leases(query)
        update = {"status": InstanceStatus.PENDING, "made_by": "gateway-silent"}
        return page.model_copy(
            update={"items": tuple(one.model_copy(update=update) for one in page.items)}
        )

    hears_regularly(bench.gateway.membership)
    with monkeypatch.context() as patch:
        patch.setattr(bench.hub, "leases", old)
        await bench.gateway.sweep.once()
    assert (await bench.hub.lease(made["id"])).status is InstanceStatus.RUNNING
    shown = (await ann.get(f"/instances/{made['id']}")).json()["data"]
    assert shown["status"] == "Running"
