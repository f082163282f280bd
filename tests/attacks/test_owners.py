"""Attacks of one owner on another, and of low roles, through the gateway's routes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from aenv_ray.clock import Clock
from aenv_ray.errors import ArtifactStoreDenied, FabricUnavailable, Forbidden, PolicyRefused
from aenv_ray.hub import catalog, core, environments, services
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles, Upload
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import (
    EVERYBODY,
    AuditRecord,
    EnvironmentQuery,
    EnvironmentVersion,
    NameRecord,
    Page,
    Right,
    Role,
)
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project import project
from aenv_ray.serve.gateway import artifact_collection, idempotency
from aenv_ray.serve.gateway.artifact_collection import (
    GIVE_UP_AFTER,
    GRACE_S,
    ArtifactCollector,
)
from aenv_ray.serve.gateway.auth import RequestRate
from aenv_ray.serve.gateway.routes import artifacts
from aenv_ray.serve.gateway.routes.admin import POOLS
from aenv_ray.serve.gateway.routes.routing import AUDITED, ControlRoute
from aenv_ray.serve.gateway.settings import GatewaySettings
from aenv_ray.serve.services import storage as storages
from tests.contract.gateway.gateway_bench import Bench, a_gateway
from tests.contract.hub.hub_contract import START_S, entry
from tests.contract.hub.redis_servers import emptied
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis

SECRET = "hunter2-hunter2"
QUOTA = 200_000


@dataclass(frozen=True)
class Cast:
    """A gateway, and clients of several owners and roles."""

    bench: Bench
    alice: httpx.AsyncClient
    """Publisher; she has published helper@1.0.0, with a secret in its variables."""
    bob: httpx.AsyncClient
    """Another publisher."""
    user: httpx.AsyncClient
    """Role user, of an owner of its own."""
    admin: httpx.AsyncClient
    archive: str
    """Digest of Alice's archive."""


def archived(root: Path, name: str, version: str = "1.0.0", **deploy: Any) -> bytes:
    """Return the archive of a project."""
    directory = root / f"{name}-{version}"
    (directory / "src").mkdir(parents=True, exist_ok=True)
    config = {"name": name, "version": version, "deployConfig": {"network": "none", **deploy}}
    (directory / "config.json").write_text(json.dumps(config))
    return project.load(directory).archive()


async def push(http: httpx.AsyncClient, data: bytes) -> httpx.Response:
    """Upload an archive and publish it; return the answer that decides."""
    digest = hashlib.sha256(data).hexdigest()
    stored = await http.put(f"/artifacts/{digest}", content=data)
    if stored.status_code != 200:
        return stored
    return await http.post("/publish", json={"archive": digest})


@pytest.fixture
async def cast(tmp_path: Path, module_redis: RedisServer) -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(a_gateway(tmp_path, redis=module_redis))
        object.__setattr__(bench.gateway.deps, "artifact_quota_bytes", QUOTA)

        async def client(role: Role, owner: str) -> httpx.AsyncClient:
            secret = await bench.token(role, owner)
            return await stack.enter_async_context(bench.client(secret))

        alice = await client(Role.PUBLISHER, "alice")
        variables = {"environmentVariables": {"KEY": SECRET}, "env": {"OLD": SECRET}}
        data = archived(tmp_path, "helper", **variables)
        assert (await push(alice, data)).status_code == 200
        yield Cast(
            bench, alice, await client(Role.PUBLISHER, "bob"), await client(Role.USER, "una"),
            await client(Role.ADMIN, "root"), hashlib.sha256(data).hexdigest(),
        )  # fmt: skip


# --- names ---------------------------------------------------------------------------------------


async def test_nobody_publishes_under_the_name_of_another_owner(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: Alice's `create helper` must never run Bob's code."""
    taken = await push(cast.bob, archived(tmp_path, "helper", "99.0.0"))
    assert (taken.status_code, "aenv grant helper bob publish" in taken.text) == (403, True)
    by_config = {"name": "helper", "version": "98.0.0"}
    assert (await cast.bob.post("/env", json=by_config)).status_code == 403
    assert (await cast.bob.put("/env/helper/98.0.0", json=by_config)).status_code == 403
    assert (await cast.alice.get("/env/helper")).json()["data"]["version"] == "1.0.0"
    assert await cast.bench.hub.has_artifact("alice", cast.archive)


async def test_nobody_takes_the_name_of_a_built_in_environment(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: settings of the operator, such as AENV_ALLOW_CHAT_MODELS, mean the built-in."""
    by_config = {"name": "tau2", "version": "9.0.0"}
    for http in (cast.alice, cast.bob):
        taken = await push(http, archived(tmp_path, "tau2", "9.0.0", chatModel=True))
        assert (taken.status_code, "built-in environment" in taken.text) == (403, True)
        assert (await http.post("/env", json=by_config)).status_code == 403
    assert (await cast.bench.hub.name("tau2")).owner is None
    published = await push(cast.admin, archived(tmp_path, "tau2", "9.0.0"))
    assert published.status_code == 200
    assert (await cast.admin.put("/names/tau2/grants/bob", json={"right": "publish"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "tau2", "9.1.0"))).status_code == 403
    assert (await push(cast.bob, archived(tmp_path, "tau2", "9.1.0"))).status_code == 200


async def test_the_name_of_a_built_in_environment_is_not_its_earlier_owners(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: a release may add a built-in whose name a publisher has."""
    monkeypatch.setattr(project, "_builtins", lambda: (("helper", tmp_path),))
    taken = await push(cast.alice, archived(tmp_path, "helper", "2.0.0", chatModel=True))
    assert (taken.status_code, "built-in environment" in taken.text) == (403, True)
    for name in ("alice", "bob", "*"):
        granted = await cast.alice.put(f"/names/helper/grants/{name}", json={"right": "publish"})
        assert granted.status_code == 403
    assert (await cast.alice.put("/names/helper/grants/*", json={"right": "use"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "helper", "2.0.0"))).status_code == 403
    path = "/names/helper/grants/alice"
    assert (await cast.admin.put(path, json={"right": "publish"})).is_success
    assert (await push(cast.alice, archived(tmp_path, "helper", "2.0.0"))).status_code == 200


async def test_a_grant_lets_another_owner_publish_until_it_is_revoked(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15, what it allows."""
    assert (await cast.bob.put("/names/helper/grants/bob", json={"right": "publish"})).status_code
    assert (await push(cast.bob, archived(tmp_path, "helper", "2.0.0"))).status_code == 403
    granted = await cast.alice.put("/names/helper/grants/bob", json={"right": "publish"})
    assert granted.json()["data"]["grants"] == {"bob": "publish"}
    assert (await push(cast.bob, archived(tmp_path, "helper", "2.0.0"))).status_code == 200
    assert (await cast.bob.delete("/env/helper/1.0.0")).status_code == 403
    assert (await cast.alice.delete("/env/helper/2.0.0")).status_code == 200
    assert (await cast.alice.delete("/names/helper/grants/bob")).status_code == 200
    assert (await push(cast.bob, archived(tmp_path, "helper", "3.0.0"))).status_code == 403


async def test_an_environment_is_invisible_to_other_owners(cast: Cast) -> None:
    """Invariant 15: no route tells another owner that it exists, or gives its archive away."""
    reads = (
        "/env/helper", "/env/helper/1.0.0", "/env/helper/versions", "/env/helper/1.0.0/status",
        "/env/helper/1.0.0/functions", "/names/helper", f"/artifacts/{cast.archive}",
    )  # fmt: skip
    await cast.bench.hub.put_document(POOLS, "helper@1.0.0", {"count": 1})
    assert "helper" in (await cast.alice.get("/pools")).text
    for http in (cast.bob, cast.user):
        for path in reads:
            assert (await http.get(path)).status_code == 404, path
        listed = await http.get("/env?limit=1000")
        assert "helper" not in listed.text
        assert int(listed.headers["X-Total-Count"]) == len(listed.json()["data"])
        assert (await http.get("/env?text=helper")).json()["data"] == []
        exists = await http.get("/env/helper/1.0.0/exists")
        assert exists.json()["data"]["exists"] is False
        assert (await http.head(f"/artifacts/{cast.archive}")).status_code == 404
        assert (await http.post("/env/helper/1.0.0/sign?style=read")).status_code == 404
        body = {"envName": "helper@1.0.0"}
        assert (await http.post("/env-instance", json=body)).status_code == 404
        assert (await http.post("/env-service", json=body)).status_code == 404
        assert (await http.post("/env/helper/1.0.0/release")).status_code in (403, 404)
        assert (await http.delete("/env/helper/1.0.0")).status_code in (403, 404)
        assert "helper" not in (await http.get("/pools")).text
    stolen = await cast.bob.post("/publish", json={"archive": cast.archive})
    assert stolen.status_code == 404
    assert (await cast.alice.get(f"/artifacts/{cast.archive}")).status_code == 200


async def test_a_grant_to_everybody_shares_an_environment(cast: Cast) -> None:
    """Invariant 15, what it allows; variables stay hidden, in listings from the owner too."""
    await cast.alice.put("/names/helper/grants/*", json={"right": "use"})
    for http in (cast.bob, cast.user):
        shown = await http.get("/env/helper/1.0.0")
        assert (shown.status_code, SECRET in shown.text) == (200, False)
        assert (await http.get(f"/artifacts/{cast.archive}")).status_code == 200
        assert (await http.get("/names/helper")).status_code == 403
    for http in (cast.alice, cast.bob, cast.user, cast.admin):
        for path in ("/env", "/env/helper/versions"):
            found = await http.get(path)
            assert ("helper" in found.text, SECRET in found.text) == (True, False)
    assert SECRET in (await cast.alice.get("/env/helper/1.0.0")).text
    await cast.alice.delete("/names/helper/grants/*")
    assert (await cast.bob.get("/env/helper/1.0.0")).status_code == 404


async def test_nothing_starts_without_the_right_to_use_it(cast: Cast) -> None:
    """Invariant 15: also of an environment that the gateway could resolve, or that runs already."""
    body = {"envName": "probe@1.0.0"}
    kept = await cast.bob.post("/env-service", json=body)
    assert kept.status_code == 200, kept.text
    assert (await cast.admin.delete("/names/probe/grants/*")).status_code == 200
    refused = [
        await cast.bob.post("/env-instance", json=body),
        await cast.bob.post("/env-service", json=body),
        await cast.bob.put(f"/env-service/{kept.json()['data']['id']}", json=body),
        await cast.bob.post("/env/probe/1.0.0/sign?style=read"),
    ]
    for answer in refused:
        assert answer.status_code == 404, answer.text
        assert "environment_not_found" in answer.text
    assert (await cast.admin.post("/env-instance", json=body)).status_code == 200


async def test_names_from_before_belong_to_their_first_publisher(
    module_redis: RedisServer,
) -> None:
    """Invariant 15 for a hub whose names have no owners yet: nobody takes one over."""
    server = await emptied(module_redis)
    hub = HubCore(server.connect(), FakeClock(START_S), where="test")
    try:
        await hub.push(entry("helper", "1.0.0", owner="alice"))
        await hub._ask("hdel", hub._keys.owners, "helper")  # as an earlier version left it
        before = NameRecord(name="helper", owner="alice", grants={EVERYBODY: Right.USE})
        assert await hub.name("helper") == before
        with pytest.raises(Forbidden):
            await hub.push(entry("helper", "99.0.0", owner="bob"))
        assert (await hub.environments(EnvironmentQuery(visible_to="bob"))).total == 1
        await hub.push(entry("helper", "1.1.0", owner="alice"))
        assert await hub.name("helper") == before
        await hub.grant("helper", EVERYBODY, None)
        assert (await hub.environments(EnvironmentQuery(visible_to="bob"))).total == 0
    finally:
        await hub.close()


@pytest.mark.parametrize("label", ["aenv.service", "aenv.replica", "aenv.outer", "aenv.made-by"])
async def test_an_instance_does_not_pass_for_one_of_the_fabric(cast: Cast, label: str) -> None:
    """Invariant 15: with another owner's service, the replicas would wait until it ends."""
    body = {"envName": "probe", "labels": {label: "notes"}}
    for path, more in (("/env-instance", {}), ("/instances", {"count": 2})):
        refused = await cast.bob.post(path, json=body | more)
        assert refused.status_code == 400, refused.text
        assert f"label '{label}' is reserved" in refused.text
    listed = await cast.bench.gateway.deps.fabric.list_instances()
    assert not any(label in info.labels for info in listed)


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.USER, Role.PUBLISHER])
async def test_a_role_is_refused_what_needs_a_higher_one(cast: Cast, role: Role) -> None:
    """Every route checks the role before it reads the body."""
    async with cast.bench.client(await cast.bench.token(role, "zoe")) as http:
        for route in cast.bench.gateway.control_api.routes:
            if not isinstance(route, ControlRoute) or not route.guards:
                continue
            if route.path.endswith("/sign"):
                continue  # its style decides, see the next test
            path = route.path.replace("{name}", "helper").replace("{version}", "1.0.0")
            path = path.replace("{id}", "x").replace("{digest}", "0" * 64)
            path = path.replace("{owner:path}", "zoe").replace("{reference}", "*")
            path = path.replace("{subject:path}", "owner:zoe")
            answer = await http.request(route.method, path, content=b"{}")
            is_refused = answer.status_code == 403 and "needs a token with role" in answer.text
            least = route.guards[0].least
            assert is_refused == (not role.includes(least)), f"{route.method} {route.path}"


async def test_new_tokens_have_the_least_role(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15; tokens with the earlier role owner may still publish."""
    made = (await cast.admin.post("/tokens", json={"owner": "carl"})).json()["data"]
    assert made["role"] == "user"
    old = (await cast.admin.post("/tokens", json={"owner": "carl", "role": "owner"})).json()["data"]
    assert old["role"] == "publisher"
    data = archived(tmp_path, "mine")
    async with cast.bench.client(made["token"]) as http:
        assert (await push(http, data)).status_code == 403
        assert (await http.post("/env/mine/1.0.0/sign?style=write")).status_code == 403
        assert (
            await http.post("/tokens", json={"owner": "carl", "role": "admin"})
        ).status_code == 403
        assert (await http.delete(f"/tokens/{old['id']}")).json()["data"] is False
    async with cast.bench.client(old["token"]) as http:
        assert (await push(http, data)).status_code == 200


# --- policy --------------------------------------------------------------------------------------


async def test_the_policy_is_checked_at_publish_at_create_and_for_services(
    cast: Cast, tmp_path: Path
) -> None:
    """The operator decides, and a refusal names the setting."""
    deps, now = cast.bench.gateway.deps, [Policy()]
    object.__setattr__(deps, "policy", lambda: now[0])
    cast.bench.gateway.creator._policy = lambda: now[0]
    cast.bench.gateway.services._policy = lambda: now[0]
    now[0] = STRICT
    config = {"name": "mine", "deployConfig": {"network": "host"}}
    refused = [
        await cast.alice.post("/env", json=config),
        await cast.alice.post("/env-instance", json={"envName": "probe"}),
        await cast.alice.post("/env-service", json={"envName": "probe"}),
        await cast.alice.post("/env-instance", json={"envName": "probe", "ttl": "30d"}),
    ]
    for answer in refused:
        assert answer.status_code == 403, answer.text
        assert answer.json()["error"]["code"] == PolicyRefused.code
        assert "AENV_" in answer.json()["error"]["hint"]


# --- artifacts -----------------------------------------------------------------------------------


async def test_an_owner_cannot_fill_the_artifact_store(cast: Cast, tmp_path: Path) -> None:
    """Invariant 7 for the node's disk: a quota per owner, and nothing is kept beyond it."""
    sent = 0
    for number in range(10):
        data = bytes([number]) * (QUOTA * 2 // 5)
        answer = await cast.bob.put(f"/artifacts/{hashlib.sha256(data).hexdigest()}", content=data)
        sent += answer.status_code == 200
    assert (sent, answer.status_code) == (2, 413)
    assert "AENV_ARTIFACT_QUOTA" in answer.json()["error"]["hint"]
    store = tmp_path / "artifacts"
    files = [f for f in store.rglob("*") if f.is_file() and f.name != cast.archive]
    assert sum(f.stat().st_size for f in files) <= QUOTA
    assert (await push(cast.alice, archived(tmp_path, "other"))).status_code == 200


async def test_publishing_does_not_evade_the_artifact_quota(cast: Cast, tmp_path: Path) -> None:
    """Invariant 7: what is uploaded compressed is stored unpacked, and counts as that."""
    directory = tmp_path / "zeros"
    (directory / "src").mkdir(parents=True)
    config = {"name": "zeros", "version": "1.0.0", "deployConfig": {"network": "none"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "src" / "zeros.bin").write_bytes(bytes(QUOTA))
    packed = gzip.compress(project.load(directory).archive())
    assert len(packed) < QUOTA // 10
    answer = await push(cast.bob, packed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "artifact_quota_exceeded")
    assert "AENV_ARTIFACT_QUOTA" in answer.json()["error"]["hint"]
    assert await cast.bench.hub.artifacts_held("bob") == (0, 0)
    kept = {f.name for f in (tmp_path / "artifacts").rglob("*") if f.is_file()}
    assert kept == {cast.archive}


class _Untouched(DirectoryFiles):
    """A directory that nothing may be written to."""

    def begin(self) -> Upload:
        raise AssertionError("an upload began")


async def test_a_full_owner_sends_nothing_to_the_store(cast: Cast, tmp_path: Path) -> None:
    """Invariant 7: not even a temporary file, or owners could fill the disk for a while."""
    deps = cast.bench.gateway.deps
    data = bytes(QUOTA)
    digest = hashlib.sha256(data).hexdigest()
    assert (await cast.bob.put(f"/artifacts/{digest}", content=data)).status_code == 200
    untouched = ArtifactStore(_Untouched(tmp_path / "artifacts", deps.clock))
    object.__setattr__(deps, "artifacts", untouched)
    answer = await cast.bob.put(f"/artifacts/{'0' * 64}", content=b"more")
    untouched.close()
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "artifact_quota_exceeded")


async def test_an_owner_has_no_room_for_any_number_of_artifacts(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: those of a byte cost no quota, but an inode of the store and memory of Redis."""
    assert catalog.MAX_ARTIFACTS <= 10_000
    monkeypatch.setattr(catalog, "MAX_ARTIFACTS", 5)
    answers = []
    for number in range(7):
        data = b"%d" % number
        digest = hashlib.sha256(data).hexdigest()
        answers.append(await cast.bob.put(f"/artifacts/{digest}", content=data))
    assert [answer.status_code for answer in answers] == [200] * 5 + [413] * 2
    assert not await cast.bench.gateway.deps.artifacts.exists(digest)
    again = "/artifacts/" + hashlib.sha256(b"0").hexdigest()
    assert (await cast.bob.put(again, content=b"0")).status_code == 200


def with_secret(tmp_path: Path) -> bytes:
    """Return the archive of a project that is refused: it has a file with the name of a key."""
    directory = tmp_path / "keyed"
    (directory / "src").mkdir(parents=True)
    config = {"name": "keyed", "version": "1.0.0", "deployConfig": {"network": "none"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "src" / "id_rsa").write_text("not a key")
    return project.load(directory).archive()


async def test_who_asks_for_any_archive_makes_nobody_read_the_catalog(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: a version has up to 1 MiB, and a token sends 500 requests per second."""
    environments = cast.bench.hub.environments

    async def read(query: EnvironmentQuery) -> Page[EnvironmentVersion]:
        assert query.name is not None, f"the catalog is read: {query}"
        return await environments(query)

    monkeypatch.setattr(cast.bench.hub, "environments", read)
    unknown = ("0" * 64, "nothing", "%FF", "a b")
    for digest in (*unknown, cast.archive):
        assert (await cast.user.get(f"/artifacts/{digest}")).status_code == 404
        assert (await cast.bob.post("/publish", json={"archive": digest})).status_code in (400, 404)
    await cast.alice.put("/names/helper/grants/una", json={"right": "use"})
    assert (await cast.user.get(f"/artifacts/{cast.archive}")).status_code == 200
    refused = with_secret(tmp_path)
    assert (await push(cast.bob, refused)).status_code == 400
    assert not await cast.bench.gateway.deps.artifacts.exists(hashlib.sha256(refused).hexdigest())


async def test_unreferenced_artifacts_are_collected_and_others_are_not(
    cast: Cast, tmp_path: Path
) -> None:
    """Artifacts that were never published, or whose versions were deleted, free their space."""
    waste = b"never published"
    digest = hashlib.sha256(waste).hexdigest()
    await cast.bob.put(f"/artifacts/{digest}", content=waste)
    gateway = cast.bench.gateway
    now = gateway.deps.clock.now()
    artifacts = gateway.deps.artifacts

    def collector(later_s: float) -> ArtifactCollector:
        return ArtifactCollector(cast.bench.hub, artifacts, FakeClock(now + later_s))

    assert await collector(0.0).once() == []
    assert await collector(GRACE_S + 60).once() == [digest]
    assert not await artifacts.exists(digest)
    assert await artifacts.exists(cast.archive)
    assert await cast.bench.hub.artifacts_held("bob") == (0, 0)
    await cast.alice.delete("/env/helper/1.0.0")
    assert await collector(GRACE_S + 60).once() == [cast.archive]


class _Meanwhile(ArtifactStore):
    """A store in which something happens before each deletion."""

    def __init__(self, root: Path, clock: Clock, act: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(DirectoryFiles(root / "artifacts", clock))
        self._act = act

    async def delete(self, digest: str) -> None:
        await self._act(digest)
        await super().delete(digest)


async def test_the_collector_deletes_no_archive_that_is_published_meanwhile(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 6: neither the one that it deletes, nor a later one of the same round."""
    monkeypatch.setattr(artifact_collection, "GRACE_S", 0.0)
    deps, hub = cast.bench.gateway.deps, cast.bench.hub
    helper = (await cast.alice.get(f"/artifacts/{cast.archive}")).content
    assert (await cast.alice.delete("/env/helper/1.0.0")).status_code == 200
    digests = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(1000)]
    number, waste = next((n, d) for n, d in enumerate(digests) if d < cast.archive)
    assert (await cast.bob.put(f"/artifacts/{waste}", content=b"%d" % number)).status_code == 200
    answers = []

    async def act(digest: str) -> None:
        answers.append((digest, (await push(cast.alice, helper)).status_code))

    store = _Meanwhile(tmp_path, deps.clock, act)
    collector = ArtifactCollector(hub, store, deps.clock)
    assert await collector.once() == [waste]
    assert answers == [(waste, 200)]
    assert await store.exists(cast.archive)

    assert (await cast.alice.delete("/env/helper/1.0.0")).status_code == 200
    assert await collector.once() == [cast.archive]
    assert answers[1:] == [(cast.archive, 409)]
    assert (await push(cast.alice, helper)).status_code == 200
    assert await store.exists(cast.archive)
    store.close()


async def test_an_artifact_that_could_not_be_deleted_is_deleted_later(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an owner could fill the store with archives that count as nobody's."""
    monkeypatch.setattr(artifact_collection, "GRACE_S", 0.0)
    deps, hub = cast.bench.gateway.deps, cast.bench.hub
    waste = []
    for number in range(GIVE_UP_AFTER + 1):
        content = b"waste %d" % number
        waste.append(hashlib.sha256(content).hexdigest())
        await cast.bob.put(f"/artifacts/{waste[-1]}", content=content)
    tried = []

    async def act(digest: str) -> None:
        tried.append(digest)
        raise FabricUnavailable("the store is down")

    down = _Meanwhile(tmp_path, deps.clock, act)
    with pytest.raises(FabricUnavailable):
        await ArtifactCollector(hub, down, deps.clock).once()
    down.close()
    assert tried == sorted(waste)[:GIVE_UP_AFTER]  # they cannot be uploaded for a while
    assert (await hub.artifacts_held("bob")).number == len(waste)
    collector = ArtifactCollector(hub, deps.artifacts, deps.clock)
    assert await collector.once() == sorted(waste)
    assert not any([await deps.artifacts.exists(digest) for digest in waste])


async def test_an_artifact_that_cannot_be_deleted_is_in_nobodys_way(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store lets it be written, and not deleted."""
    monkeypatch.setattr(artifact_collection, "GRACE_S", 0.0)
    deps, hub = cast.bench.gateway.deps, cast.bench.hub
    digests = {}
    for content in (b"waste", b"more waste"):
        digest = hashlib.sha256(content).hexdigest()
        await cast.bob.put(f"/artifacts/{digest}", content=content)
        digests[digest] = content
    stays, goes = sorted(digests)

    async def act(digest: str) -> None:
        if digest == stays:
            raise ArtifactStoreDenied("its owner is another user")

    store = _Meanwhile(tmp_path, deps.clock, act)
    for _ in range(2):
        with pytest.raises(ArtifactStoreDenied):
            await ArtifactCollector(hub, store, deps.clock).once()
        assert not await store.exists(goes)
        again = await cast.bob.put(f"/artifacts/{stays}", content=digests[stays])
        assert again.status_code == 200
    store.close()


async def test_a_published_archive_that_is_refused_later_stays_accounted_for(
    cast: Cast, tmp_path: Path
) -> None:
    """Or an owner could fill the store with archives that count as nobody's."""
    data = with_secret(tmp_path)
    digest = hashlib.sha256(data).hexdigest()
    await cast.bob.put(f"/artifacts/{digest}", content=data)
    allowed = {"archive": digest, "allow_secrets": ["src/id_rsa"]}
    assert (await cast.bob.post("/publish", json=allowed)).status_code == 200
    assert (await cast.bob.post("/publish", json={"archive": digest})).status_code == 400
    assert await cast.bench.hub.artifacts_held("bob") == (len(data), 1)
    await cast.bob.delete("/env/keyed/1.0.0")
    deps = cast.bench.gateway.deps
    clock = FakeClock(deps.clock.now() + GRACE_S + 60)
    assert digest in await ArtifactCollector(cast.bench.hub, deps.artifacts, clock).once()
    assert not await deps.artifacts.exists(digest)


class _CutOff(DirectoryFiles):
    """A directory whose gateway dies as soon as a file is stored."""

    def begin(self) -> Upload:
        upload = super().begin()
        commit = upload.commit

        def cut_off(digest: str) -> None:
            commit(digest)
            raise FabricUnavailable("the gateway died")

        upload.commit = cut_off  # type: ignore[method-assign]
        return upload


async def test_an_upload_that_is_cut_off_is_collected(cast: Cast, tmp_path: Path) -> None:
    """An owner cannot fill the store with artifacts that nothing accounts for."""
    deps = cast.bench.gateway.deps
    now, artifacts = deps.clock.now(), deps.artifacts
    cutting = ArtifactStore(_CutOff(tmp_path / "artifacts", deps.clock))
    object.__setattr__(deps, "artifacts", cutting)
    waste = b"cut off"
    digest = hashlib.sha256(waste).hexdigest()
    assert (await cast.bob.put(f"/artifacts/{digest}", content=waste)).status_code == 503
    assert await artifacts.exists(digest)
    later = ArtifactCollector(cast.bench.hub, artifacts, FakeClock(now + GRACE_S + 60))
    assert await later.once() == [digest]
    assert not await artifacts.exists(digest)
    cutting.close()


async def test_an_upload_is_no_larger_than_a_project(cast: Cast) -> None:
    """Invariant 7: and nothing of a larger one is kept."""
    assert GatewaySettings().max_artifact_bytes == 256 << 20
    deps = cast.bench.gateway.deps
    smaller = deps.settings.model_copy(update={"max_artifact_bytes": 1000})
    object.__setattr__(deps, "settings", smaller)
    data = bytes(1001)
    digest = hashlib.sha256(data).hexdigest()
    assert (await cast.bob.put(f"/artifacts/{digest}", content=data)).status_code == 413
    assert not await deps.artifacts.exists(digest)
    assert await cast.bench.hub.artifacts_held("bob") == (0, 0)


async def test_a_refused_publish_deletes_nothing_that_others_need(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15: two owners may have the same archive, and a version outlives its grant."""
    data = (await cast.alice.get(f"/artifacts/{cast.archive}")).content
    assert (await push(cast.bob, data)).status_code == 403
    assert await cast.bench.hub.artifacts_held("bob") == (0, 0)
    assert (await cast.alice.get(f"/artifacts/{cast.archive}")).content == data
    await cast.alice.put("/names/helper/grants/bob", json={"right": "publish"})
    second = archived(tmp_path, "helper", "2.0.0")
    assert (await push(cast.bob, second)).status_code == 200
    await cast.alice.delete("/names/helper/grants/bob")
    assert (await push(cast.bob, second)).status_code == 403
    kept = await cast.alice.get(f"/artifacts/{hashlib.sha256(second).hexdigest()}")
    assert kept.content == second


async def test_an_owner_publishes_its_own_upload_and_not_that_of_another(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15: AEnvironment's client uploads first, and then names a version."""
    uploads = {}
    for owner, http in (("alice", cast.alice), ("bob", cast.bob)):
        signed = (await http.post("/env/mine/1.0.0/sign?style=write")).json()["data"]
        uploads[owner] = archived(tmp_path / owner, "mine", ttl="1h" if owner == "bob" else "2h")
        path = httpx.URL(signed).raw_path.decode()
        async with cast.bench.client("") as nobody:
            assert (await nobody.put(path, content=uploads[owner])).status_code == 200
            forged = path.replace(f"owner={owner}", "owner=root")
            assert forged != path
            assert (await nobody.put(forged, content=b"x")).status_code == 403
            assert (await nobody.put(path.partition("?")[0], content=b"x")).status_code >= 400
    mine = {"name": "mine", "version": "1.0.0"}
    assert (await cast.alice.post("/env", json=mine)).status_code == 200
    published = await cast.bench.hub.environment("mine", "1.0.0")
    assert published.archive == hashlib.sha256(uploads["alice"]).hexdigest()


async def test_an_owner_publishes_no_archive_of_another(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: who knows a digest must have sent the content, or may use the environment."""
    private = archived(tmp_path, "private")
    digest = hashlib.sha256(private).hexdigest()
    assert (await cast.alice.put(f"/artifacts/{digest}", content=private)).status_code == 200
    answer = await cast.bob.post("/publish", json={"archive": digest})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "artifact_not_found")
    assert await cast.bench.hub.artifacts_held("bob") == (0, 0)


async def test_a_refused_publish_leaves_the_upload_of_another_owner(
    cast: Cast, tmp_path: Path
) -> None:
    """Invariant 15: both have sent the same archive, and only one may publish it."""
    same = archived(tmp_path, "helper", "3.0.0")
    path = f"/artifacts/{hashlib.sha256(same).hexdigest()}"
    assert (await cast.alice.put(path, content=same)).status_code == 200
    assert (await push(cast.bob, same)).status_code == 403
    assert (await cast.alice.get(path)).content == same


async def test_one_owner_has_not_all_turns_to_upload(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: an upload that trickles in keeps its turn, and others wait for it."""
    free = asyncio.Event()
    turns = cast.bench.gateway.control_api.state.control.uploads

    async def trickle() -> AsyncIterator[bytes]:
        yield b"a"
        await free.wait()
        yield b"b"

    digest = hashlib.sha256(b"ab").hexdigest()
    async with asyncio.TaskGroup() as group:
        slow = [
            group.create_task(cast.bob.put(f"/artifacts/{digest}", content=trickle()))
            for _ in range(30)
        ]
        other = hashlib.sha256(b"other").hexdigest()
        async with asyncio.timeout(30):
            # Until each has its turn, or waits for it.
            while turns._running.total() + len(turns._waiting.get("bob", ())) < len(slow):  # noqa: ASYNC110  # a task of its own sets neither
                await asyncio.sleep(0)
            answer = await cast.alice.put(f"/artifacts/{other}", content=b"other")
        assert answer.status_code == 200
        free.set()
    assert {task.result().status_code for task in slow} == {200}

    monkeypatch.setattr(artifacts, "UPLOAD_S", 0.05)
    free.clear()
    async with asyncio.timeout(30):
        late = await cast.bob.put(f"/artifacts/{'0' * 64}", content=trickle())
    assert (late.status_code, late.headers["connection"]) == (408, "close")
    assert "did not arrive within" in late.text


async def test_a_publish_that_takes_long_stops_no_other_owner(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: the code of a publisher, which is loaded then, may sleep for minutes."""
    download, began, free = artifacts._download, asyncio.Event(), asyncio.Event()

    async def slow(store: ArtifactStore, digest: str, target: Path) -> None:
        await download(store, digest, target)
        if digest in mine:
            began.set()
            await free.wait()

    monkeypatch.setattr(artifacts, "_download", slow)
    mine = []
    for number in range(5):
        data = archived(tmp_path, f"slow-{number}")
        mine.append(hashlib.sha256(data).hexdigest())
        assert (await cast.bob.put(f"/artifacts/{mine[-1]}", content=data)).status_code == 200
    async with asyncio.TaskGroup() as group:
        bodies = [{"archive": digest} for digest in mine]
        tasks = [group.create_task(cast.bob.post("/publish", json=body)) for body in bodies]
        await began.wait()
        async with asyncio.timeout(30):
            assert (await push(cast.alice, archived(tmp_path, "other"))).status_code == 200
        free.set()
    assert {task.result().status_code for task in tasks} == {200}


async def test_signed_urls_have_a_request_rate(cast: Cast) -> None:
    """Invariant 7: they need no token, and would otherwise evade its rate."""
    signed = (await cast.alice.post("/env/helper/1.0.0/sign?style=read")).json()["data"]
    path = httpx.URL(signed).raw_path.decode()
    rate = RequestRate(per_s=0.001, burst=3, clock=cast.bench.gateway.deps.clock)
    object.__setattr__(cast.bench.gateway.control_api.state.control, "rate", rate)
    async with cast.bench.client("") as nobody:
        assert [(await nobody.get(path)).status_code for _ in range(5)] == [200] * 3 + [429] * 2


async def test_publishes_take_turns(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: parallel ones do not fill the memory and the disk of a gateway."""
    download, running = artifacts._download, set[str]()
    most = 0

    async def watched(store: ArtifactStore, digest: str, target: Path) -> None:
        nonlocal most
        running.add(digest)
        for _ in range(200):  # the others get as far as they can
            most = max(most, len(running))
            await asyncio.sleep(0)
        await download(store, digest, target)
        running.discard(digest)

    monkeypatch.setattr(artifacts, "_download", watched)
    digests = []
    for number in range(4):
        data = archived(tmp_path, f"many-{number}")
        digests.append(hashlib.sha256(data).hexdigest())
        await cast.bob.put(f"/artifacts/{digests[-1]}", content=data)
    async with asyncio.TaskGroup() as group:
        bodies = [{"archive": digest} for digest in digests]
        answers = [group.create_task(cast.bob.post("/publish", json=body)) for body in bodies]
    assert {answer.result().status_code for answer in answers} == {200}
    assert most == 1


# --- memory of the hub ---------------------------------------------------------------------------


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


async def test_failed_creates_leave_little_in_the_hub_and_not_for_long(cast: Cast) -> None:
    """Invariant 7: no quota counts them, and each may have an Idempotency-Key of its own."""
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


async def test_an_owner_has_so_many_services_with_so_much_text(
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


# --- audit log -----------------------------------------------------------------------------------


async def test_what_changes_rights_is_in_the_audit_log(cast: Cast, tmp_path: Path) -> None:
    """Refused attempts are too; secrets are not (invariant 10), and others cannot read it."""
    await push(cast.bob, archived(tmp_path, "helper", "99.0.0"))
    made = (await cast.admin.post("/tokens", json={"owner": "eve"})).json()["data"]
    await cast.admin.delete(f"/tokens/{made['id']}")
    await cast.alice.put("/names/helper/grants/bob", json={"right": "use"})
    log = (await cast.admin.get("/audit")).json()["data"]
    found = [(r["actor"], r["action"], r["subject"], r["outcome"]) for r in log]
    assert found == [
        ("alice", "grant.set", "helper", "ok"),
        ("root", "token.revoke", made["id"], "ok"),
        ("root", "token.create", made["id"], "ok"),
        ("bob", "publish", "", "forbidden"),
        ("alice", "publish", "helper@1.0.0", "ok"),
    ]
    assert log[0]["detail"] == {"owner": "bob", "right": "use"}
    assert made["token"] not in json.dumps(log)
    older = (await cast.admin.get(f"/audit?before={log[1]['id']}&limit=2")).json()["data"]
    assert [r["id"] for r in older] == [r["id"] for r in log[2:4]]
    for http in (cast.alice, cast.user):
        assert (await http.get("/audit")).status_code == 403


async def test_refused_attempts_are_recorded_and_displace_nothing(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A low role can neither try unseen, nor push what it did out of the log."""
    monkeypatch.setattr(core, "AUDIT_KEPT", dict.fromkeys(core.AUDIT_KEPT, 100))
    refused = [
        await cast.user.post("/publish", json={"archive": cast.archive}),
        await cast.user.post("/tokens", json={"owner": "eve"}),
        await cast.user.put("/quotas/owner:una", json={"max_instances": 9}),
    ]
    assert {answer.status_code for answer in refused} == {403}
    assert (await cast.user.delete("/tokens/unknown")).json()["data"] is False
    log = (await cast.admin.get("/audit")).json()["data"]
    assert [(r["actor"], r["role"], r["action"], r["subject"], r["outcome"]) for r in log[:4]] == [
        ("una", "user", "token.revoke", "unknown", "not_found"),
        ("una", "user", "quota.set", "owner:una", "forbidden"),
        ("una", "user", "token.create", "", "forbidden"),
        ("una", "user", "publish", "", "forbidden"),
    ]
    for _ in range(500):
        await cast.bench.hub.record(AuditRecord(actor="una", action="publish", outcome="forbidden"))
    log = list(await cast.bench.hub.audit_log(1000))
    assert len(log) < 400
    assert (log[-1].action, log[-1].subject, log[-1].outcome) == ("publish", "helper@1.0.0", "ok")
    async with cast.bench.client("wrong") as nobody:
        assert (await nobody.post("/tokens", json={"owner": "eve"})).status_code == 401
    assert await cast.bench.hub.audit_log(1) == tuple(log[:1])


async def test_what_a_low_role_does_displaces_nothing_of_a_higher_one(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent tokens, which every owner creates, push no publish or grant out of the log."""
    monkeypatch.setattr(core, "AUDIT_KEPT", dict.fromkeys(core.AUDIT_KEPT, 100))
    made = (await cast.admin.post("/tokens", json={"owner": "eve"})).json()["data"]["id"]
    for role, actions in (
        (Role.USER, ["token.create", "token.revoke"]),
        (Role.PUBLISHER, ["token.create", "token.revoke"]),
        (Role.PUBLISHER, ["grant.set"]),
    ):
        for number in range(500):
            action = actions[number % len(actions)]
            await cast.bench.hub.record(AuditRecord(actor="una", role=role, action=action))
        log = await cast.bench.hub.audit_log(1000)
        assert ("token.create", made) in [(r.action, r.subject) for r in log]
        is_kept = ("publish", "helper@1.0.0") in [(r.action, r.subject) for r in log]
        assert is_kept or actions == ["grant.set"]  # publishers share their part of the log
    assert len(log) < 600
    assert sorted(log, key=lambda r: r.id and tuple(map(int, r.id.split("-")))) == list(log[::-1])


def test_every_audited_route_exists(cast: Cast) -> None:
    routes = cast.bench.gateway.control_api.routes
    names = {f"{r.method} {r.path}" for r in routes if isinstance(r, ControlRoute)}
    assert set(AUDITED) <= names


# --- addresses -----------------------------------------------------------------------------------


async def test_no_url_in_an_answer_leads_where_the_host_header_says(cast: Cast) -> None:
    """Invariant 10: a signed URL, which is a credential, is not sent to another machine."""
    for host in ("evil.example:8080", "evil.example", "a@evil.example"):
        headers = {"Host": host}
        signed = await cast.alice.post("/env/helper/1.0.0/sign?style=read", headers=headers)
        assert "evil" not in signed.text


async def test_the_host_header_does_not_replace_the_path_that_was_signed(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 15: so does Starlette before 1.0.1 (CVE-2026-48710)."""

    def url(self: HTTPConnection) -> URL:
        return URL(f"http://{self.headers['host']}{self.scope['path']}")

    assert (await push(cast.bob, archived(tmp_path, "mine"))).is_success
    monkeypatch.setattr(HTTPConnection, "url", property(url))
    for style, method in (("read", "GET"), ("write", "PUT")):
        made = await cast.bob.post(f"/env/mine/1.0.0/sign?style={style}")
        signed = URL(made.json()["data"])
        async with cast.bench.client(None) as http:
            for stolen in ("helper", "mine"):
                answer = await http.request(
                    method,
                    f"/archives/{stolen}/1.0.0?{signed.query}",
                    headers={"Host": f"x{signed.path}?"},
                    content=b"" if method == "GET" else b"archive",
                )
                assert answer.status_code == (403 if stolen == "helper" else 200), answer.text
