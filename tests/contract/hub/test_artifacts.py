"""The artifact store, over each place that it can be in: whole or not there, and always right."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.config import read_settings
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    ArtifactNotFound,
    ArtifactStoreDenied,
    ArtifactStoreFull,
    ArtifactTooLarge,
    ConfigError,
    FabricUnavailable,
)
from aenv_ray.hub import artifacts
from aenv_ray.hub.artifacts import (
    PARTIAL_AGE_S,
    PIECE_BYTES,
    ArtifactStore,
    DirectoryFiles,
    UrlFiles,
    open_artifact_store,
)
from tests.contract.hub import s3_server
from tests.fake_clock import FakeClock

LARGE = os.urandom(2 * PIECE_BYTES + 17)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Place:
    """Where a store is, and a way past it to its files."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> ArtifactStore:
        settings = read_settings().model_copy(update={"artifacts_url": self.url})
        return open_artifact_store(settings)

    def damage(self, digest: str) -> None:
        import fsspec

        fs, path = fsspec.core.url_to_fs(f"{self.url}/{digest[:2]}/{digest}")
        fs.pipe_file(path, b"\0damage" + fs.cat_file(path)[7:])

    def unfinished(self) -> list[str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(f"{self.url}/unfinished")
        fs.invalidate_cache()
        return [str(found) for found in fs.find(root)] if fs.exists(root) else []


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a bucket of an object store, which ``AWS_ENDPOINT_URL`` names."""
    import s3fs

    log = tmp_path_factory.mktemp("s3") / "log"
    with s3_server.running(log) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        s3fs.S3FileSystem().mkdir("environments")
        yield "s3://environments"
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["directory", "file", "memory", "local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """``local`` is a directory again, through fsspec's eyes: as any URL."""
    if request.param == "s3":
        return Place(f"{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}")
    if request.param == "memory":
        return Place(f"memory://{uuid.uuid4().hex}")
    prefix = {"directory": "", "file": "file://", "local": "dir::file://"}[request.param]
    return Place(f"{prefix}{tmp_path / 'store'}")


@pytest.fixture
def store(place: Place) -> Iterator[ArtifactStore]:
    if place.url.startswith("dir::"):
        place.url = place.url.removeprefix("dir::")
        opened = ArtifactStore(UrlFiles(place.url))
    else:
        opened = place.open()
    yield opened
    opened.close()


async def slowly(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
        await asyncio.sleep(0)


@pytest.mark.parametrize("data", [b"", b"x", LARGE], ids=["nothing", "a byte", "pieces"])
async def test_a_stored_artifact_is_read_back(store: ArtifactStore, data: bytes) -> None:
    digest = await store.put(data)
    assert digest == digest_of(data)
    assert await store.read(digest) == data
    assert await store.size(digest) == len(data)
    assert await store.exists(digest)


async def test_a_stream_is_the_same_as_its_bytes(store: ArtifactStore, place: Place) -> None:
    told: list[tuple[int, int | None]] = []
    digest = await store.put(
        slowly(LARGE, 70_001), on_progress=lambda done, total: told.append((done, total))
    )
    assert digest == digest_of(LARGE)
    assert told == [(PIECE_BYTES, None), (2 * PIECE_BYTES, None), (len(LARGE), None)]
    told.clear()
    pieces = [
        piece
        async for piece in store.open(digest, on_progress=lambda done, _: told.append((done, _)))
    ]
    assert b"".join(pieces) == LARGE
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 17]
    assert told[-1] == (len(LARGE), len(LARGE))
    assert place.unfinished() == []


async def test_a_missing_artifact_is_a_typed_error(store: ArtifactStore) -> None:
    digest = digest_of(b"never")
    assert not await store.exists(digest)
    for call in (store.read(digest), store.size(digest)):
        with pytest.raises(ArtifactNotFound) as raised:
            await call
        assert raised.value.hint
    await store.delete(digest)


async def test_deletion_is_final_and_idempotent(store: ArtifactStore) -> None:
    digest = await store.put(b"data")
    for _ in range(2):
        await store.delete(digest)
        assert not await store.exists(digest)


async def test_content_that_does_not_match_its_digest_is_not_stored(
    store: ArtifactStore, place: Place
) -> None:
    wrong = digest_of(b"other")
    with pytest.raises(ArtifactDamaged):
        await store.put(b"data", digest=wrong)
    assert not await store.exists(wrong)
    assert not await store.exists(digest_of(b"data"))
    assert place.unfinished() == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_error_for_a_large_artifact_names_the_limit(
    store: ArtifactStore, place: Place, is_stream: bool
) -> None:
    data = slowly(LARGE, 100_000) if is_stream else LARGE
    with pytest.raises(ArtifactTooLarge, match=str(PIECE_BYTES)):
        await store.put(data, limit_bytes=PIECE_BYTES)
    assert not await store.exists(digest_of(LARGE))
    assert place.unfinished() == []
    digest = await store.put(LARGE)
    with pytest.raises(ArtifactTooLarge):
        await store.read(digest, limit_bytes=PIECE_BYTES)


async def test_damage_is_found_before_the_last_chunk_and_repaired_by_a_push(
    store: ArtifactStore, place: Place
) -> None:
    """Invariant 6: a name never returns other content."""
    digest = await store.put(LARGE)
    place.damage(digest)
    got: list[bytes] = []

    async def fetch() -> None:
        async for piece in store.open(digest):
            got.append(piece)  # noqa: PERF401  # what came before it failed

    with pytest.raises(ArtifactDamaged, match=digest[:12]):
        await fetch()
    assert len(b"".join(got)) < len(LARGE)
    with pytest.raises(ArtifactDamaged):
        await store.read(digest)
    await store.put(LARGE)
    assert await store.read(digest) == LARGE


async def test_concurrent_writers_of_an_artifact_do_not_interfere(
    store: ArtifactStore, place: Place
) -> None:
    digest = digest_of(LARGE)
    async with asyncio.TaskGroup() as group:
        puts = [group.create_task(store.put(slowly(LARGE, 300_000))) for _ in range(6)]
        await puts[0]
        reads = [group.create_task(store.read(digest)) for _ in range(6)]
    assert {put.result() for put in puts} == {digest}
    assert all(read.result() == LARGE for read in reads)
    assert place.unfinished() == []


async def test_a_stream_that_breaks_leaves_nothing(store: ArtifactStore, place: Place) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield LARGE
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        await store.put(breaking())
    assert place.unfinished() == []


async def test_cancelling_leaves_nothing(store: ArtifactStore, place: Place) -> None:
    """Invariant 11."""
    under_way = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield LARGE
        under_way.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.put(endless()))
    await under_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert place.unfinished() == []


@pytest.mark.parametrize("name", ["", "..", "../" * 20 + "etc/passwd", "A" * 64, "a" * 63])
async def test_only_digests_are_names(store: ArtifactStore, name: str) -> None:
    for call in (store.read(name), store.size(name), store.exists(name), store.delete(name),
                 store.put(b"", digest=name)):  # fmt: skip
        with pytest.raises(ConfigError, match="invalid artifact digest"):
            await call


# --- what goes wrong there ------------------------------------------------------------------------


class Failing:
    """A file system of which every call raises the same."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (PermissionError("no"), ArtifactStoreDenied),
        (OSError(errno.EROFS, "read-only"), ArtifactStoreDenied),
        (OSError(errno.ENOSPC, "no space left"), ArtifactStoreFull),
        (OSError(errno.EDQUOT, "quota"), ArtifactStoreFull),
        (ConnectionRefusedError("port 9000"), FabricUnavailable),
        (TimeoutError("slow"), FabricUnavailable),
        (RuntimeError("of some library, with s3cret:pa55 in it"), FabricUnavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_failures_of_the_storage_are_typed_and_contain_no_secrets(
    error: Exception, typed: type[AenvError]
) -> None:
    """Invariant 10."""
    files = UrlFiles("memory://s3cret:pa55@bucket/path")
    files._fs = Failing(error)
    store = ArtifactStore(files)
    digest = digest_of(b"x")
    for call in (store.put(b"x"), store.read(digest), store.exists(digest), store.delete(digest)):
        with pytest.raises(typed) as raised:
            await call
        assert "memory://bucket/path" in raised.value.message
        assert "pa55" not in f"{raised.value.message} {raised.value.hint} {store.name}"
        assert raised.value.hint
    store.close()


async def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(DirectoryFiles(tmp_path, FakeClock()))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ArtifactStoreFull):
            await store.put(b"data")
    assert not await store.exists(digest_of(b"data"))
    assert list((tmp_path / "unfinished").iterdir()) == []
    store.close()


async def test_a_store_that_hangs_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 9."""
    import threading

    let_go = threading.Event()
    monkeypatch.setattr(artifacts, "DEADLINE_S", 0.05)
    files = UrlFiles("memory://hangs")
    monkeypatch.setattr(files, "size", lambda digest: let_go.wait(30))
    store = ArtifactStore(files)
    with pytest.raises(FabricUnavailable, match="did not answer"):
        await store.exists(digest_of(b""))
    let_go.set()
    store.close()


async def test_what_a_killed_writer_left_is_removed_a_day_later(tmp_path: Path) -> None:
    clock = FakeClock()
    files = DirectoryFiles(tmp_path, clock)
    files.begin().abort()
    left = tmp_path / "unfinished" / "left"
    left.touch()
    clock.advance(left.stat().st_mtime - clock.now() + PARTIAL_AGE_S - 1)
    files.begin().abort()
    assert left.exists()
    clock.advance(2)
    files.begin().abort()
    assert not left.exists()


@pytest.mark.parametrize("url", ["nothing://bucket", "gs://key:pa55@bucket/x", "memory"])
def test_an_invalid_url_is_refused_when_the_store_is_opened(url: str, tmp_path: Path) -> None:
    if url == "memory":  # a relative path is a directory
        assert Place(url).open().name == "memory"
        return
    with pytest.raises(ConfigError) as raised:
        Place(url).open()
    assert "AENV_ARTIFACTS_URL" in raised.value.message
    assert "pa55" not in str(raised.value)


def test_without_a_setting_it_is_in_the_data_directory(tmp_path: Path) -> None:
    settings = read_settings().model_copy(update={"data_dir": tmp_path})
    assert open_artifact_store(settings).name == str(tmp_path / "artifacts")
