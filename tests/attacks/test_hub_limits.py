"""Attacks on the memory of the hub, which all owners share, and on its quotas."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.errors import CapacityExceeded, FabricUnavailable, SessionLost
from aenv_ray.hub import core, environments, services
from aenv_ray.policy import STRICT, Policy
from aenv_ray.serve.gateway import artifact_collection, idempotency
from aenv_ray.serve.gateway.artifact_collection import ArtifactCollector
from aenv_ray.serve.gateway.routes import artifacts
from aenv_ray.serve.services import sessions
from aenv_ray.serve.services import storage as storages
from aenv_ray.serve.services.sessions import Sessions
from tests.attacks.owners import Cast, archived
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
    seconds, _ = await redis.time()
    group = await redis.zrange("{aenv}:once:group:creates:una", 0, -1, withscores=True)
    assert len(group) == 3
    assert all(
        forgotten_ms / 1000 <= seconds + 1 + idempotency.FAILED_TTL_S for _, forgotten_ms in group
    )
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


class CountedHub:
    """A hub whose requests are counted."""

    def __init__(self, hub: Any) -> None:
        self.hub = hub
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.hub, name)


async def test_a_session_that_is_lost_again_and_again_stays_one_small_record(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a service of an owner may have a tool that ends its sandbox."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    alive: set[str] = set()

    async def is_alive(instance_id: str) -> bool:
        return instance_id in alive

    hub: Any = CountedHub(cast.bench.hub)
    redis, requests = cast.bench.hub._redis, []
    for number in range(20):
        desk = f"desk-{number}"
        alive = {desk}
        for name in ("s", "t", "u", "another"):
            replica = Sessions(hub, "una", "uid", is_alive)  # one that knows no session yet
            begin = hub.requests
            with contextlib.suppress(SessionLost, CapacityExceeded):
                await replica.holder(name, desk)
            with contextlib.suppress(CapacityExceeded):
                assert await replica.holder(name, desk) == desk
            requests.append(hub.requests - begin)
        kept = [key async for key in redis.scan_iter("{aenv}:once:service-session:*")]
        assert len(kept) == 3
        assert [await redis.strlen(key) < 40 for key in kept] == [True] * 3
        assert await redis.zcard("{aenv}:once:group:service-sessions:una") == 3
    assert max(requests) <= 4


async def test_idempotency_keys_of_creates_do_not_fill_the_hub(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: quotas count instances, which may end at once, and the key is kept for a day."""
    monkeypatch.setattr(idempotency, "MAX_KEYS", 3)

    async def create(http: httpx.AsyncClient, key: str) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        answer = await http.post("/instances", json={"envName": "probe"}, headers=headers)
        if answer.status_code == 200:
            await http.delete(f"/instances/{answer.json()['data'][0]['id']}")
        return answer

    for _ in range(3):  # each takes the place of the one before
        cast.bench.fabric.failure = FabricUnavailable("away")
        assert (await create(cast.user, "0")).status_code == 503
        cast.bench.fabric.failure = None
    answers = [await create(cast.user, str(number)) for number in range(5)]
    assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
    assert answers[4].json()["error"]["code"] == "capacity_exceeded"
    assert (await create(cast.user, "0")).status_code == 410, "a key that is known is answered"
    assert (await cast.user.post("/instances", json={"envName": "probe"})).status_code == 200
    assert (await create(cast.bob, "3")).status_code == 200
    redis = cast.bench.hub._redis
    assert len([key async for key in redis.scan_iter("{aenv}:once:create:*")]) == 4


async def test_concurrent_signed_uploads_do_not_exceed_their_limit(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a body may take minutes, in which others are stored."""
    monkeypatch.setattr(artifacts, "MAX_UPLOADS", 2)
    store, all_ready = cast.bench.gateway.deps.artifacts, asyncio.Barrier(4)
    put = store.put

    async def put_together(*arguments: Any, **options: Any) -> str:
        await all_ready.wait()
        return await put(*arguments, **options)

    monkeypatch.setattr(store, "put", put_together)
    paths = []
    for number in range(4):
        signed = await cast.bob.post(f"/env/mine/{number}.0.0/sign?style=write")
        paths.append(httpx.URL(signed.json()["data"]).raw_path.decode())
    async with cast.bench.client("") as nobody:
        async with asyncio.TaskGroup() as group:
            puts = [group.create_task(nobody.put(path, content=b"x")) for path in paths]
        codes = sorted(one.result().status_code for one in puts)
        assert codes == [200, 200, 413, 413]
        assert len(await cast.bench.hub.documents(artifacts.UPLOADS)) == 2


async def test_a_published_upload_makes_room_for_another(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(artifacts, "MAX_UPLOADS", 1)
    async with cast.bench.client("") as nobody:
        for number in range(3):
            version = f"{number}.0.0"
            signed = await cast.alice.post(f"/env/mine/{version}/sign?style=write")
            path = httpx.URL(signed.json()["data"]).raw_path.decode()
            content = archived(tmp_path / version, "mine", version=version)
            for _ in range(2):  # the second time it is replaced
                assert (await nobody.put(path, content=content)).status_code == 200
            sent = {"name": "mine", "version": version}
            assert (await cast.alice.post("/env", json=sent)).status_code == 200


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
