"""Creates over the gateway: groups, slow creates, idempotency keys, clients that leave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.actors.fabric.async_fabric import GATEWAY_QUEUE_S
from aenv_ray.errors import CapacityExceeded, FabricUnavailable, SandboxStartFailed
from aenv_ray.hub.records import LeaseQuery, Quota
from aenv_ray.ids import instance_ids
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway import idempotency
from aenv_ray.serve.gateway.idempotency import FAILED_TTL_S, Claim
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.contract.gateway.gateway_bench import CREATE, Bench, a_gateway, created

pytestmark = pytest.mark.redis


async def test_a_group_is_created_as_a_whole_or_not_at_all(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    answer = await ann.post("/instances", json=CREATE | {"count": 3})
    assert [one["status"] for one in answer.json()["data"]] == ["Running"] * 3
    await bench.hub.set_quota(Quota(subject="owner:ann", max_instances=5))
    refused = await ann.post("/instances", json=CREATE | {"count": 3})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "quota_exceeded"
    assert len(await bench.fabric.list_instances()) == 3


async def test_a_failed_create_does_not_count_towards_the_quota(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    await bench.hub.set_quota(Quota(subject="owner:ann", max_instances=1))
    bench.fabric.failure = SandboxStartFailed("its code does not load")
    assert (await ann.post("/instances", json=CREATE)).status_code == 502
    bench.fabric.failure = None
    assert (await ann.post("/instances", json=CREATE)).status_code == 200


async def test_a_create_in_a_full_cluster_queues_once(bench: Bench, ann: httpx.AsyncClient) -> None:
    """The fabric has queued it before it says so, and the client does not wait twice as long."""
    bench.fabric.failure = CapacityExceeded("full", retry_after_s=7)
    answer = await ann.post("/instances", json=CREATE)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert bench.fabric.queues_s == [GATEWAY_QUEUE_S]
    assert (await bench.hub.leases(LeaseQuery())).total == 0


async def test_a_create_on_a_dead_host_is_tried_again_within_the_time_of_the_first(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    bench.fabric.failure = FabricUnavailable("its host died")
    assert (await ann.post("/instances", json=CREATE)).status_code == 503
    first, second = bench.fabric.queues_s
    assert 0 < second < first == GATEWAY_QUEUE_S
    assert (await bench.hub.leases(LeaseQuery())).total == 0


async def test_a_slow_create_is_answered_pending_and_can_be_watched(root: Path) -> None:
    async with a_gateway(root, GatewaySettings(create_wait_s=0)) as bench:
        bench.fabric.gate.clear()
        async with bench.owner("ann") as http:
            made = await created(http)
            assert (made["status"], made["ip"]) == ("Pending", "")
            watching = asyncio.create_task(http.get(f"/instances/{made['id']}?wait_s=20"))
            events = asyncio.create_task(http.get(f"/instances/{made['id']}/events"))
            bench.fabric.gate.set()
            running = (await watching).json()["data"]
            assert running["status"] == "Running"
            assert running["ip"] != ""
            await http.delete(f"/instances/{made['id']}")
            text = (await events).text
    assert text.startswith("event: status\ndata: {")
    assert '"status":"Terminated"' in text


async def test_a_slow_create_that_fails_says_why(root: Path) -> None:
    async with a_gateway(root, GatewaySettings(create_wait_s=0)) as bench:
        bench.fabric.gate.clear()
        async with bench.owner("ann") as http:
            made = await created(http)
            bench.fabric.failure = SandboxStartFailed("its code does not load")
            bench.fabric.gate.set()
            failed = (await http.get(f"/env-instance/{made['id']}?wait_s=20")).json()["data"]
    assert (failed["status"], failed["reason"]) == ("Failed", "its code does not load")


async def test_the_key_of_a_slow_create_that_failed_is_free(root: Path) -> None:
    """Its leases are kept for a while, so that its reason can be read."""
    async with a_gateway(root, GatewaySettings(create_wait_s=0)) as bench:
        bench.fabric.gate.clear()
        async with bench.owner("ann") as http:
            http.headers["Idempotency-Key"] = "k1"
            made = await created(http)
            bench.fabric.failure = SandboxStartFailed("its code does not load")
            bench.fabric.gate.set()
            path = f"/env-instance/{made['id']}"
            assert (await http.get(f"{path}?wait_s=20")).json()["data"]["status"] == "Failed"
            bench.fabric.failure = None
            again = await created(http)
            assert again["id"] != made["id"]
            running = (await http.get(f"/env-instance/{again['id']}?wait_s=20")).json()["data"]
            assert running["status"] == "Running"
            assert (await created(http))["id"] == again["id"]


async def test_a_create_whose_instance_died_is_answered_at_once(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k1"}
    made = (await ann.post("/instances", json=CREATE, headers=key)).json()["data"][0]
    await bench.hub.update_lease(made["id"], status=InstanceStatus.FAILED, reason="it died")
    async with asyncio.timeout(20):
        again = await ann.post("/instances", json=CREATE, headers=key)
    assert again.status_code == 410


async def test_the_same_key_gives_the_same_instance(
    bench: Bench, ann: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    """Also while the first create is still in progress."""
    key = {"Idempotency-Key": "k1"}
    bench.fabric.gate.clear()
    both = [asyncio.create_task(ann.post("/instances", json=CREATE, headers=key)) for _ in range(2)]
    await bench.fabric.asked.wait()
    bench.fabric.gate.set()
    ids = {(await one).json()["data"][0]["id"] for one in both}
    again = await ann.post("/instances", json=CREATE, headers=key)
    assert {again.json()["data"][0]["id"]} == ids
    assert len(bench.fabric.created) == 1
    other = await ann.post("/instances", json=CREATE | {"ttl": "5m"}, headers=key)
    assert other.status_code == 400
    hers = await bob.post("/instances", json=CREATE, headers=key)
    assert {hers.json()["data"][0]["id"]} != ids
    await ann.delete(f"/instances/{ids.pop()}")
    gone = await ann.post("/instances", json=CREATE, headers=key)
    assert gone.status_code == 410


async def test_the_same_key_gives_the_same_group(bench: Bench, ann: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "k1"}
    wish = CREATE | {"count": 3}
    first, again = [await ann.post("/instances", json=wish, headers=key) for _ in range(2)]
    ids = [one["id"] for one in first.json()["data"]]
    assert len(set(ids)) == 3
    assert [one["id"] for one in again.json()["data"]] == ids
    assert len(await bench.fabric.list_instances()) == 3


def test_a_claim_is_read_as_it_was_stored() -> None:
    """Also one of an earlier version, which stored the ids of a group."""
    for count in (1, 3):
        claim = Claim(
            "k", "ann", "f", instance_ids("a" * 80, "seed", count), "replica", 1.5, "seed"
        )
        assert Claim.from_json("k", "ann", claim.to_json()).ids == claim.ids
    old = '{"wish": "f", "ids": ["w-aaaaaaaa", "w-bbbbbbbb"], "by": "replica", "at": 1.5}'
    assert Claim.from_json("k", "ann", old).ids == ["w-aaaaaaaa", "w-bbbbbbbb"]


async def test_a_key_whose_first_creates_failed_finds_its_instance_as_long_as_others(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """What is remembered of the creates that failed is forgotten sooner."""
    key = {"Idempotency-Key": "k1"}

    async def create(**changes: Any) -> httpx.Response:
        return await ann.post("/instances", json=CREATE | changes, headers=key)

    bench.fabric.failure = FabricUnavailable("away")
    assert [(await create()).status_code for _ in range(3)] == [503] * 3
    bench.fabric.failure = None
    instance = (await create()).json()["data"][0]["id"]
    redis = bench.hub._redis
    async for name in redis.scan_iter("{aenv}:once:*"):
        if await redis.ttl(name) <= FAILED_TTL_S:  # as if that time had passed
            await redis.delete(name)
    assert (await create()).json()["data"][0]["id"] == instance
    assert (await create(ttl="5m")).status_code == 400
    await ann.delete(f"/instances/{instance}")
    assert (await create()).status_code == 410
    assert bench.fabric.created == [instance]


async def test_creates_with_the_key_of_one_that_failed_make_one_instance(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    key = {"Idempotency-Key": "k1"}
    bench.fabric.failure = FabricUnavailable("away")
    assert (await ann.post("/instances", json=CREATE, headers=key)).status_code == 503
    bench.fabric.failure = None
    bench.fabric.gate.clear()
    both = [asyncio.create_task(ann.post("/instances", json=CREATE, headers=key)) for _ in range(2)]
    await bench.fabric.asked.wait()
    bench.fabric.gate.set()
    ids = {(await one).json()["data"][0]["id"] for one in both}
    assert bench.fabric.created == list(ids)


async def test_a_key_is_free_again_when_its_create_failed_after_the_answer(
    bench: Bench, ann: httpx.AsyncClient
) -> None:
    """The hub keeps the failed lease with its reason, and no request waits for it."""
    key = {"Idempotency-Key": "k1"}
    bench.fabric.failure = SandboxStartFailed("its code does not load")
    wish = CREATE | {"count": 2, "wait": False}
    pending = await ann.post("/instances", json=wish, headers=key)
    failed = [one["id"] for one in pending.json()["data"]]
    for one in failed:
        shown = await ann.get(f"/instances/{one}?wait_s=20")
        assert shown.json()["data"]["status"] == "Failed"
    bench.fabric.failure = None
    made = await ann.post("/instances", json=wish | {"wait": True}, headers=key)
    assert [one["status"] for one in made.json()["data"]] == ["Running"] * 2
    assert bench.fabric.created == [one["id"] for one in made.json()["data"]]
    assert not set(failed) & set(bench.fabric.created)


@pytest.mark.parametrize("status", [InstanceStatus.FAILED, InstanceStatus.TERMINATED])
async def test_a_key_whose_instance_has_ended_says_so_at_once(
    bench: Bench, ann: httpx.AsyncClient, status: InstanceStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the hub keeps its lease, as when its TTL has passed or its sandbox died."""
    key = {"Idempotency-Key": "k1"}
    made = (await ann.post("/instances", json=CREATE, headers=key)).json()["data"]
    await bench.hub.update_lease(made[0]["id"], status=status)
    monkeypatch.setattr(idempotency, "_POLL_S", 3600.0)
    gone = await ann.post("/instances", json=CREATE, headers=key)
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "instance_released")


async def test_a_create_whose_client_left_is_undone(bench: Bench, ann: httpx.AsyncClient) -> None:
    """AEnvironment's client repeats a create after a timeout, without a key."""
    bench.fabric.gate.clear()
    body = b'{"envName": "probe"}'
    secret = ann.headers["authorization"]
    sent = [
        {"type": "http.request", "body": body, "more_body": False},
    ]
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody reads an answer")

    scope = {
        "type": "http", "method": "POST", "path": "/env-instance", "raw_path": b"/env-instance",
        "query_string": b"", "headers": [(b"authorization", secret.encode())],
        "server": ("gateway", 8080), "scheme": "http", "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    request = asyncio.create_task(bench.gateway.app(scope, receive, send))  # type: ignore[arg-type]
    await bench.fabric.asked.wait()
    left.set()
    await request
    bench.fabric.gate.set()
    assert (await bench.hub.leases(LeaseQuery())).total == 0
    assert await bench.fabric.list_instances() == []
