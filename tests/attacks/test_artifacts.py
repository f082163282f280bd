"""Attacks of one owner on the artifacts of another, and on the room of the artifact store."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from aenv_ray.clock import Clock
from aenv_ray.errors import ArtifactStoreDenied, FabricUnavailable
from aenv_ray.hub import catalog
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles, Upload
from aenv_ray.hub.records import EnvironmentQuery, EnvironmentVersion, Page
from aenv_ray.project import project
from aenv_ray.serve.gateway import artifact_collection
from aenv_ray.serve.gateway.artifact_collection import GIVE_UP_AFTER, GRACE_S, ArtifactCollector
from aenv_ray.serve.gateway.auth import RequestRate
from aenv_ray.serve.gateway.routes import artifacts
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.attacks.owners import QUOTA, Cast, archived, push
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis


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


async def test_the_number_of_artifacts_of_an_owner_is_limited(
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


async def test_requests_for_arbitrary_archives_do_not_read_the_catalog(
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
    """Invariant 6: neither the archive being deleted nor a later one of the same round."""
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
    """Otherwise an owner could fill the store with archives that count towards no quota."""
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


async def test_an_artifact_that_cannot_be_deleted_blocks_no_other(
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
    """Otherwise an owner could fill the store with archives that count towards no quota."""
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
    (root,) = await cast.bench.hub.tokens("root")
    for owner, http in (("alice", cast.alice), ("bob", cast.bob)):
        signed = (await http.post("/env/mine/1.0.0/sign?style=write")).json()["data"]
        uploads[owner] = archived(tmp_path / owner, "mine", ttl="1h" if owner == "bob" else "2h")
        path = httpx.URL(signed).raw_path.decode()
        async with cast.bench.client("") as nobody:
            assert (await nobody.put(path, content=uploads[owner])).status_code == 200
            forged = str(httpx.URL(path).copy_set_param("token", root.id))
            assert forged != path
            assert (await nobody.put(forged, content=b"x")).status_code == 403
            assert (await nobody.put(path.partition("?")[0], content=b"x")).status_code >= 400
    mine = {"name": "mine", "version": "1.0.0"}
    assert (await cast.alice.post("/env", json=mine)).status_code == 200
    published = await cast.bench.hub.environment("mine", "1.0.0")
    assert published.archive == hashlib.sha256(uploads["alice"]).hexdigest()


async def test_an_owner_publishes_no_archive_of_another(cast: Cast, tmp_path: Path) -> None:
    """Invariant 15: to know a digest is not enough; the owner must have sent the content."""
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


async def test_slow_uploads_of_one_owner_do_not_block_others(
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


async def test_a_slow_publish_does_not_block_other_owners(
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


async def test_publishes_run_one_at_a_time(
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
