"""Attacks on the memory of the hub, which all owners share, and on its quotas."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from aenv_ray.errors import CapacityExceeded
from aenv_ray.hub import core, environments, services
from aenv_ray.policy import STRICT, Policy
from aenv_ray.serve.gateway import artifact_collection, idempotency
from aenv_ray.serve.gateway.artifact_collection import ArtifactCollector
from aenv_ray.serve.gateway.routes import artifacts
from aenv_ray.serve.services import sessions
from aenv_ray.serve.services import storage as storages
from aenv_ray.serve.services.sessions import Sessions
from tests.attacks.owners import Cast
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis


async def test_low_roles_do_not_fill_the_hub(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: Redis refuses to write when it is full, so the hub would stop for all."""
    long = await cast.alice.put(f"/names/helper/grants/{'x' * 60_000}", json={"right": "use"})
    assert long.status_code == 400
    assert (await cast.alice.get("/names/helper")).json()["data"]["grants"] == {}
    monkeypatch.setattr(environments, "MAX_GRANTS", 3)
    grants = [
        await cast.alice.put(f"/names/helper/grants/{number}", json={"right": "use"})
        for number in range(5)
    ]
    assert [answer.status_code for answer in grants] == [200] * 3 + [409] * 2

    monkeypatch.setattr(core, "MAX_AGENT_TOKENS", 3)
    made = await cast.alice.post("/instances", json={"envName": "probe"})
    instance = made.json()["data"][0]["id"]
    tokens = [await cast.alice.post(f"/instances/{instance}/token") for _ in range(5)]
    assert [answer.status_code for answer in tokens] == [200] * 3 + [409] * 2

    monkeypatch.setattr(artifacts, "MAX_UPLOADS", 3)
    uploads = []
    for number in range(5):
        signed = await cast.bob.post(f"/env/mine/{number}.0.0/sign?style=write")
        path = httpx.URL(signed.json()["data"]).raw_path.decode()
        async with cast.bench.client("") as nobody:
            uploads.append(await nobody.put(path, content=b"x"))
    assert [answer.status_code for answer in uploads] == [200] * 3 + [413] * 2
    deps = cast.bench.gateway.deps
    later = FakeClock(deps.clock.now() + artifact_collection.UPLOAD_KEPT_S + 60)
    await cast.bench.hub.put_document(artifacts.UPLOADS, "old@1.0.0 bob", {"archive": "a" * 64})
    await ArtifactCollector(cast.bench.hub, deps.artifacts, later).once()
    kept = await cast.bench.hub.documents(artifacts.UPLOADS)
    assert list(kept) == ["old@1.0.0 bob"]  # of an earlier version: forgotten a day later


async def test_failed_creates_leave_small_records_that_expire_soon(cast: Cast) -> None:
    """Invariant 7: no quota counts them, and each may have its own Idempotency-Key."""
    await cast.admin.put("/quotas/owner:una", json={"max_instances": 1})
    for number in range(3):
        wish = {"envName": "probe", "count": 1000}
        headers = {"Idempotency-Key": str(number)}
        assert (await cast.user.post("/instances", json=wish, headers=headers)).status_code == 429
    redis, sizes = cast.bench.hub._redis, []
    for kind in ("create", "admission", "void"):
        async for key in redis.scan_iter(f"{{aenv}}:once:{kind}:*"):
            sizes.append(await redis.strlen(key))
            assert 0 < await redis.ttl(key) <= idempotency.FAILED_TTL_S
    assert len(sizes) == 9
    assert max(sizes) < 400


async def test_clients_of_services_do_not_fill_the_hub(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: anybody with a token can send a new session id, or call id, with each call."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "MAX_CALLS", 3)

    async def is_alive(_: str) -> bool:
        return True

    hub = cast.bench.hub
    services_of_una = [Sessions(hub, "una", uid, is_alive) for uid in ("first", "second")]
    long = "\U0001f4a5" * 190
    for number in range(5):
        for service in services_of_una:
            with contextlib.suppress(CapacityExceeded):
                await service.holder(f"{long}{number}", "desk-1")
            with contextlib.suppress(CapacityExceeded):
                await service.holder_of_call(f"{long}{number}", "desk-1", 60.0)
    with pytest.raises(CapacityExceeded, match="3 sessions in 24 hours"):
        await services_of_una[0].holder("new", "desk-1")
    with pytest.raises(CapacityExceeded, match="3 calls with ids"):
        await services_of_una[0].holder_of_call("new", "desk-1", 60.0)
    assert await services_of_una[0].holder(f"{long}0", "desk-2") == "desk-1"
    assert await services_of_una[0].holder_of_call(f"{long}0", "desk-2", 60.0) == "desk-1"
    kept = [key async for key in hub._redis.scan_iter("{aenv}:once:service-*")]
    assert len(kept) == 6
    assert max(map(len, kept)) < 110
    another = Sessions(hub, "bob", "third", is_alive)
    assert await another.holder("new", "desk-3") == "desk-3"


async def test_the_number_and_size_of_an_owners_services_are_limited(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: those without replicas too, since every request to a service reads them all."""
    monkeypatch.setattr(services, "MAX_SERVICES", 3)
    create = {"envName": "probe", "replicas": 0}
    made = [await cast.user.post("/env-service", json=create) for _ in range(5)]
    assert [answer.status_code for answer in made] == [200] * 3 + [409] * 2
    assert (await cast.bob.post("/env-service", json=create)).status_code == 200

    monkeypatch.setattr(services, "MAX_OWNER_BYTES", 20_000)
    large = {"environment_variables": {"A": "x" * 20_000}}
    mine = made[0].json()["data"]["id"]
    assert (await cast.user.put(f"/env-service/{mine}", json=large)).status_code == 409
    for answer in made[:3]:  # nothing remains of a deleted one
        deleted = await cast.user.delete(f"/env-service/{answer.json()['data']['id']}")
        assert deleted.status_code == 200
    assert (await cast.user.post("/env-service", json=create | large)).status_code == 409
    storage = create | {"enable_storage": True, "storage_size": "1Gi"}
    monkeypatch.setattr(storages, "MAX_STORAGES", 2)
    kept = []
    for number in range(3):
        http = cast.user
        answer = await http.post("/env-service", json=storage | {"service_name": f"kept-{number}"})
        kept.append(answer.status_code)
        await http.delete(f"/env-service/kept-{number}")
    assert kept == [200, 200, 409]
    kinds = {k async for k in cast.bench.hub._redis.scan_iter("{aenv}:doc:service*")}
    assert kinds == {"{aenv}:doc:service"}


@pytest.mark.parametrize("sizes", [{"replicas": 5}, {"replicas": 1, "autoscale": "1:5"}])
@pytest.mark.parametrize("limit", ["quota", "policy"])
async def test_services_have_no_more_replicas_than_their_owner_may_have_instances(
    cast: Cast, sizes: dict[str, Any], limit: str
) -> None:
    """Invariant 7: a replica is a process of Ray, which no sandbox and no quota limits."""
    if limit == "quota":
        await cast.admin.put("/quotas/owner:una", json={"max_instances": 4})
        code = "quota_too_small"
    else:
        policy = Policy(max_replicas=4)
        object.__setattr__(cast.bench.gateway.services, "_policy", lambda: policy)
        code = "policy_refused"
    create = {"envName": "probe"}
    refused = await cast.user.post("/env-service", json=create | sizes)
    assert refused.json()["error"]["code"] == code
    assert cast.bench.apps.deployed == {}
    assert await cast.bench.hub.documents("service") == {}

    made = await cast.user.post("/env-service", json=create | {"replicas": 3})
    first = made.json()["data"]["id"]
    second = await cast.user.post("/env-service", json=create | {"replicas": 2})
    assert second.json()["error"]["code"] == code
    grown = await cast.user.put(f"/env-service/{first}", json=sizes)
    assert grown.json()["error"]["code"] == code
    assert cast.bench.apps.deployed[first].most_replicas == 3
    if limit == "quota":  # lowered later: what does not grow may change
        await cast.admin.put("/quotas/owner:una", json={"max_instances": 1})
        assert (await cast.user.put(f"/env-service/{first}", json={"replicas": 2})).is_success
    else:
        assert "AENV_MAX_REPLICAS" in refused.json()["error"]["hint"]
        assert STRICT.max_replicas is not None


async def test_concurrent_creates_of_services_do_not_exceed_a_quota(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, all_ready = services.ServiceRecords.add, asyncio.Barrier(8)

    async def add_together(self: services.ServiceRecords, record: services.ServiceRecord) -> None:
        await all_ready.wait()
        await add(self, record)

    monkeypatch.setattr(services.ServiceRecords, "add", add_together)
    await cast.admin.put("/quotas/owner:una", json={"max_instances": 4})
    create = {"envName": "probe", "replicas": 2}
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(cast.user.post("/env-service", json=create)) for _ in range(8)]
    made = [post.result() for post in posts if post.result().status_code == 200]
    assert len(made) <= 2
    assert sum(one.replicas for one in cast.bench.apps.deployed.values()) <= 4
    assert len(await cast.bench.hub.documents("service")) == len(made)
