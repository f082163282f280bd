"""A backup shows one moment, brings everything back, and is refused if a byte of it is wrong."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray import config
from aenv_ray.cli.main import main
from aenv_ray.errors import (
    BackupInvalid,
    CatalogConflict,
    ConfigError,
    EnvironmentNotFound,
    FabricUnavailable,
)
from aenv_ray.hub import backup as backups
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles
from aenv_ray.hub.backup import StoredHub, backup, check, restore
from aenv_ray.hub.keys import LAYOUT, RUNNING_KINDS
from aenv_ray.hub.records import AuditRecord, EnvironmentQuery, Quota, Right, Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.serve.gateway.artifact_collection import GRACE_S, ArtifactCollector
from tests.contract.hub.hub_contract import START_S, entry, lease
from tests.contract.hub.redis_servers import emptied, running
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.redis
CODE = b"an archive"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_S)


@pytest.fixture
async def hub(shared: RedisServer, clock: FakeClock) -> AsyncIterator[StoredHub]:
    hub = StoredHub((await emptied(shared)).connect(), clock, where="test")
    await hub.check_layout()
    yield hub
    await hub.close()


@pytest.fixture
async def other(shared: RedisServer, hub: StoredHub, clock: FakeClock) -> AsyncIterator[StoredHub]:
    """Return an empty hub; its prefix has a character with a meaning in patterns."""
    other = StoredHub(shared.connect(), clock, prefix="another*", where="the other")
    yield other
    await other.close()


def store_in(directory: Path, clock: FakeClock) -> ArtifactStore:
    return ArtifactStore(DirectoryFiles(directory, clock))


async def filled(hub: StoredHub, store: ArtifactStore) -> str:
    """Publish, grant and so on, and return the secret of a token."""
    digest = await store.put(CODE)
    await hub.keep_artifact("somebody", digest, len(CODE))
    waste = "0" * 64
    await hub.keep_artifact("eve", waste, 1)
    assert await hub.forget_artifact(waste, before=0.0, owner="eve")  # a deletion is under way
    await hub.push(entry(archive=digest, description="a surrogate\n"))
    await hub.push(entry(version="2.0.0", archive=digest))
    await hub.grant("weather", "bob", Right.USE)
    await hub.set_quota(Quota(subject="owner:bob", max_instances=3))
    await hub.put_document(
        "service", "desk", {"replicas": 2, "empty": [], "none": {}, "lone": "\ud800"}
    )
    await hub.record(AuditRecord(actor="eve", action="publish", outcome="forbidden"))
    await hub.record(AuditRecord(actor="somebody", action="publish", subject="weather"))
    for role in (Role.PUBLISHER, Role.USER, Role.ADMIN):
        await hub.record(AuditRecord(actor="bob", role=role, action="grant.set"))
    await hub.admit([lease()])
    await hub.create_token(Role.AGENT, "somebody", instance_id="weather-aaaa", ttl_s=600)
    secret, _ = await hub.create_token(Role.PUBLISHER, "bob", ttl_s=600)
    return secret


async def test_a_restore_brings_everything_back(
    hub: StoredHub, shared: RedisServer, clock: FakeClock, tmp_path: Path
) -> None:
    secret = await filled(hub, store_in(tmp_path / "old", clock))
    versions = [e async for e in hub.all_environments(EnvironmentQuery())]
    name, log = await hub.name("weather"), await hub.audit_log(10)
    assert len(log) == 5
    file = io.BytesIO()
    summary = await backup(hub, store_in(tmp_path / "old", clock), file, clock)
    assert (summary.versions, summary.tokens, summary.artifacts) == (2, 1, 1)
    assert summary.audit_records == 5

    await emptied(shared)
    new = store_in(tmp_path / "new", clock)
    await restore(hub, new, file, replace=False)
    assert [e async for e in hub.all_environments(EnvironmentQuery())] == versions
    assert await hub.name("weather") == name
    assert await hub.quotas() == {"owner:bob": (0, 3)}
    assert await hub.documents("service") == {
        "desk": {"replicas": 2, "empty": [], "none": {}, "lone": "\ud800"}
    }
    token = await hub.check_token(secret)
    assert token is not None
    assert token.owner == "bob"
    assert [t.role for t in await hub.tokens()] == [Role.PUBLISHER]
    assert (await hub.audit_log(10))[1:] == log
    assert (await hub.audit_log(1))[0].action == "hub.restore"
    assert await new.read(versions[0].archive) == CODE
    assert await hub.artifacts_held("somebody") == (len(CODE), 1)
    found = (await hub.environments(EnvironmentQuery(text="surrog", tag="Ünï"))).items
    assert [e.version for e in found] == ["1.0.0"]


async def test_only_an_empty_hub_is_restored_into(
    hub: StoredHub, other: StoredHub, clock: FakeClock, tmp_path: Path
) -> None:
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await backup(hub, store, file, clock)
    secret, _ = await other.create_token(Role.ADMIN, "operator")
    await other.push(entry("other"))
    await other.record(AuditRecord(actor="operator", action="grant.set"))
    await other.record(AuditRecord(actor="eve", action="token.create", outcome="forbidden"))
    with pytest.raises(CatalogConflict, match="not empty") as raised:
        await restore(other, store_in(tmp_path / "new", clock), file, replace=False)
    assert "--replace" in str(raised.value.hint)
    assert not (tmp_path / "new").exists()
    assert (await other.environment("other")).name == "other"

    await restore(other, store, file, replace=True)
    with pytest.raises(EnvironmentNotFound):
        await other.environment("other")
    assert (await other.environment("weather")).version == "2.0.0"
    assert await other.check_token(secret) is not None
    actions = [r.action for r in await other.audit_log(10)]
    both = ["hub.restore", "token.create", "grant.set", *["grant.set"] * 3, "publish", "publish"]
    assert actions == both


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_restore_beside_a_running_gateway_loses_no_archive(
    hub: StoredHub, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Invariant 6: until the keys are written, the collector goes by the old versions."""
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await backup(hub, store, file, clock)
    (digest,) = {e.archive async for e in hub.all_environments(EnvironmentQuery())}
    for version in ("1.0.0", "2.0.0"):
        await hub.end_leases(["weather-aaaa"])
        await hub.delete_environment("weather", version)
    clock.advance(2 * GRACE_S)
    monkeypatch.setattr(backups, "_LOOK_S", 0.01)
    load, ask, looked = hub.load, hub._ask, asyncio.Event()
    deletions = asyncio.TaskGroup()

    async def asked(command: str, *arguments: str) -> object:
        found = await ask(command, *arguments)
        if command == "exists":
            looked.set()
        return found

    async def delete() -> None:
        if when == "during":
            await looked.wait()
        await store.delete(digest)
        await hub.artifact_deleted(digest)

    async def collected(lines: list[str], *, replace: bool) -> None:
        if when != "after":
            assert await hub.forget_artifact(digest, before=clock.now() - GRACE_S)
        if when == "before":
            await delete()
        await load(lines, replace=replace)
        if when == "during":
            deletions.create_task(delete())
        if when == "after":
            assert not await hub.forget_artifact(digest, before=clock.now() - GRACE_S)

    monkeypatch.setattr(hub, "load", collected)
    monkeypatch.setattr(hub, "_ask", asked)
    async with deletions:
        await restore(hub, store, file, replace=True)
    assert await store.read((await hub.environment("weather")).archive) == CODE
    assert await hub.artifacts_held("somebody") == (len(CODE), 1)
    await ArtifactCollector(hub, store, clock).once()
    assert await store.exists(digest)


async def test_a_restore_that_fails_after_its_keys_says_how_to_continue(
    hub: StoredHub, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is no longer empty then, and the audit log records it."""
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await backup(hub, store, file, clock)

    async def fail(_: str) -> None:
        raise FabricUnavailable("Redis does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "deletion_over", fail)
        with pytest.raises(FabricUnavailable, match=r"is restored.*may be missing") as raised:
            await restore(hub, store, file, replace=True)
    assert "--replace" in str(raised.value.hint)
    assert (await hub.audit_log(1))[0].action == "hub.restore"
    await restore(hub, store, file, replace=True)


async def test_archives_that_the_backup_lacks_are_collected(
    hub: StoredHub, clock: FakeClock, tmp_path: Path
) -> None:
    """Or the store would keep what nothing accounts for."""
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await hub.keep_artifact("ann", "f" * 64, 1)
    await backup(hub, store, file, clock)
    clock.advance(1)
    await hub.keep_artifact("ann", "f" * 64, 1)  # it is about to be published
    later = await store.put(b"later")
    await hub.keep_artifact("ann", later, 5)
    await hub.push(entry("later", archive=later, owner="ann"))
    digest = (await hub.environment("weather")).archive
    await hub.keep_artifact("somebody", digest, len(CODE))
    await restore(hub, store, file, replace=True)
    assert await hub.artifacts_held("ann") == (6, 2)
    assert await hub.artifacts_before(clock.now()) == {"0" * 64}  # Eve's, whose deletion ended
    clock.advance(2 * GRACE_S)
    assert later in await ArtifactCollector(hub, store, clock).once()
    assert not await store.exists(later)
    assert await store.read(digest) == CODE


async def test_records_of_running_gateways_are_not_backed_up(
    hub: StoredHub, other: StoredHub, clock: FakeClock, tmp_path: Path
) -> None:
    """On Kubernetes there are always some: a hub with nothing else is empty."""
    for kind in RUNNING_KINDS:
        await hub.put_document(kind, "old", {})
        await other.put_document(kind, "new", {})
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await backup(hub, store, file, clock)
    await restore(other, store, file, replace=False)
    await restore(other, store, file, replace=True)
    assert (await other.environment("weather")).version == "2.0.0"
    for kind in RUNNING_KINDS:
        assert await other.documents(kind) == {"new": {}}


async def test_a_version_deleted_during_the_backup_is_left_out_completely(
    hub: StoredHub, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = store_in(tmp_path, clock), io.BytesIO()
    kept, deleted = await store.put(b"kept"), await store.put(b"deleted")
    await hub.push(entry("kept", archive=kept))
    await hub.push(entry("deleted", archive=deleted))
    snapshot = hub.snapshot

    async def slow() -> dict[str, tuple[str, list[str]]]:
        found = await snapshot()
        if await store.exists(deleted):
            await hub.delete_environment("deleted", "1.0.0")
            await store.delete(deleted)
        return found

    monkeypatch.setattr(hub, "snapshot", slow)
    summary = await backup(hub, store, file, clock)
    assert (summary.versions, summary.missing) == (1, ())


async def test_a_redis_without_memory_is_backed_up(
    hub: StoredHub, shared: RedisServer, clock: FakeClock, tmp_path: Path
) -> None:
    """It refuses writes, but what it has can be saved."""
    store = store_in(tmp_path, clock)
    await filled(hub, store)
    client = shared.connect()
    try:
        await client.config_set("maxmemory", "1")
        await hub.check_layout()
        assert (await backup(hub, store, io.BytesIO(), clock)).versions == 2
    finally:
        await client.config_set("maxmemory", "0")
        await client.aclose()


async def test_missing_and_damaged_archives_are_named(
    hub: StoredHub, clock: FakeClock, tmp_path: Path
) -> None:
    """What is not lost yet can be saved."""
    store, file = store_in(tmp_path, clock), io.BytesIO()
    kept, damaged = await store.put(b"kept"), await store.put(b"damaged")
    await hub.push(entry())
    await hub.push(entry("kept", archive=kept))
    await hub.push(entry("damaged", archive=damaged))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name == damaged]
    path.write_bytes(b"changed")
    summary = await backup(hub, store, file, clock)
    assert summary.missing == ("damaged@1.0.0", "weather@1.0.0")
    assert summary.artifacts == 1
    check(file)


async def test_every_truncated_or_damaged_file_is_refused(
    hub: StoredHub, clock: FakeClock, tmp_path: Path
) -> None:
    store, file = store_in(tmp_path, clock), io.BytesIO()
    await filled(hub, store)
    await backup(hub, store, file, clock)
    data = file.getvalue()
    content = len(data.rstrip(b"\0"))  # a tar ends with zeros
    for length in range(0, content, 509):
        with pytest.raises(BackupInvalid):
            check(io.BytesIO(data[:length]))
    for position in (data.index(CODE), data.index(b"publish")):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(BackupInvalid, match="checksum"):
            check(io.BytesIO(damaged))


def rewritten(header: dict[str, object]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info, data = tarfile.TarInfo("header.json"), json.dumps(header).encode()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


HEADER = {"format": "aenv-ray hub backup", "software": "9.9.9", "created_at": 0.0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a backup"),
        (b"anything else" * 100, "not a backup"),
        (rewritten({"format": "tar of somebody"}), "not a backup"),
        (rewritten(HEADER | {"version": 2, "layout": 1}), "9.9.9 wrote this backup in format 2"),
        (rewritten(HEADER | {"version": 1, "layout": 2}), "layout 2"),
        (rewritten(HEADER | {"version": 1, "layout": 1}), "truncated"),
    ],
)
def test_foreign_and_newer_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(BackupInvalid, match=words):
        check(io.BytesIO(data))


async def test_data_of_another_version_is_never_read(hub: StoredHub, shared: RedisServer) -> None:
    client = shared.connect()
    await client.set("{aenv}:layout", "7 9.9.9")
    await client.aclose()
    with pytest.raises(ConfigError, match=r"layout 7, written by aenv-ray 9\.9\.9") as raised:
        await hub.check_layout()
    assert "install aenv-ray 9.9.9" in str(raised.value.hint)


def test_the_commands_move_a_hub_to_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use = machines(tmp_path, monkeypatch)
    use("a")
    file = tmp_path / "hub.tar"
    assert main(["hub", "backup", str(file)]) == 3
    assert "this machine has no hub" in capfd.readouterr().err
    assert main(["hub", "restore", str(tmp_path / "none.tar")]) == 3
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    file.write_bytes(empty.getvalue())
    assert main(["hub", "restore", str(file)]) == 3  # it starts the Redis of the machine

    assert main(["hub", "backup", str(file), "--force"]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.glob("*.tar*")] == ["hub.tar"]
    use("b")
    assert main(["hub", "restore", str(file)]) == 0
    assert "restored 0 versions" in capfd.readouterr().err
    assert main(["hub", "backup", "-"]) == 0
    assert backups.FORMAT == 1


def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that changes to the directories of another machine."""

    def use(name: str) -> None:
        monkeypatch.delenv("AENV_REDIS_URL", raising=False)
        monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path / name))
        monkeypatch.setenv("AENV_RUNTIME_DIR", str(tmp_path / f"r{name}"))
        config.settings.cache_clear()

    return use


def hostile(keys: list[object] | bytes, sparse: str = "") -> io.BytesIO:
    """Return a file that is whole, and whose sums are right."""
    lines = (
        keys if isinstance(keys, bytes) else b"".join(json.dumps(k).encode() + b"\n" for k in keys)
    )
    file = io.BytesIO()
    header = {"version": 1, "layout": LAYOUT, "software": "x", "created_at": 0.0}
    summary = {
        "keys_sha256": hashlib.sha256(lines).hexdigest(), "versions": 0, "tokens": 0,
        "audit_records": 0, "artifacts": 0, "artifact_bytes": 0, "missing": [],
    }  # fmt: skip
    members = {"header.json": json.dumps(header).encode(), "hub.jsonl": lines,
               "summary.json": json.dumps(summary).encode()}  # fmt: skip
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name == sparse:
                info.pax_headers = {"GNU.sparse.map": f"0,{len(content)}",
                                    "GNU.sparse.size": str(1 << 40)}  # fmt: skip
            tar.addfile(info, io.BytesIO(content))
    return file


@pytest.mark.parametrize(
    "keys",
    [
        [["name:weather", "string", []]],
        [["layout", "hash", ["version", "9"]]],
        [["lease:one:x", "hash", ["status", "Running"]]],
        [["env:entries", "hash", ["odd"]]],
        [["env:entries", "hash", [["nested"], "x"]]],
        [["env:index", "zset", ["member", "nan"]]],
        [["env:index", "zset", ["member", "many"]]],
        [["audit", "stream", ["2-0", "{}", "1-0", "{}"]]],
        [["audit", "stream", ["*", "{}"]]],
        [["a", "set", []], ["a", "hash", []]],
        [["token:records", "set", ["x"]]],
        [["artifact:of:ann", "zset", ["a", "1"]]],
        [["artifact:owners", "hash", ["a", "1"]]],
        [[1, 2, 3]],
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
async def test_a_hostile_file_leaves_the_hub_as_it_was(
    hub: StoredHub, clock: FakeClock, tmp_path: Path, keys: list[object] | bytes
) -> None:
    """Invariant 5: the old keys are deleted before the new ones are written."""
    await hub.push(entry())
    with pytest.raises(BackupInvalid, match="not a backup of a hub"):
        await restore(hub, store_in(tmp_path, clock), hostile(keys), replace=True)
    assert (await hub.environment("weather")).name == "weather"


@pytest.mark.parametrize("member", ["hub.jsonl", "summary.json"])
def test_a_member_that_is_larger_than_the_file_is_not_read(member: str) -> None:
    """It would fill the memory of the hub's node."""
    assert check(hostile([]))[0] == []
    with pytest.raises(BackupInvalid, match="not a backup of a hub"):
        check(hostile([], sparse=member))
