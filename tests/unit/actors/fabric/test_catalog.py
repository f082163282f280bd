"""Published versions as projects on this node."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.fabric import catalog
from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.errors import ArtifactDamaged
from aenv_ray.hub.records import EnvironmentVersion
from aenv_ray.project import project
from aenv_ray.project.project import Project


class Store:
    """The part of an artifact store that reads archives; each read waits for `gate`."""

    is_directory = False

    def __init__(self) -> None:
        self.archives: dict[str, bytes] = {}
        self.gate = asyncio.Event()
        self.reading = 0
        self.most = 0
        self.reads: list[str] = []
        self.failure: Exception | None = None

    async def read(self, digest: str) -> bytes:
        self.reads.append(digest)
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            return self.archives[digest]
        finally:
            self.reading -= 1


def published(root: Path, store: Store, name: str) -> EnvironmentVersion:
    directory = root / name
    (directory / "src").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"name": name}))
    found = project.load(directory)
    store.archives[name] = found.archive()
    return EnvironmentVersion(
        name=name, version="1.0.0", digest=found.digest, archive=name, archive_bytes=1,
        config={"name": name}, owner="ann",
    )  # fmt: skip


async def begun() -> None:
    """Let all tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def store() -> Any:
    return Store()


async def test_parallel_first_creates_read_an_archive_once(tmp_path: Path, store: Any) -> None:
    """Invariant 7: each would hold the whole archive in the gateway's memory."""
    entry = published(tmp_path, store, "a")
    one = Catalog(None, store, tmp_path / "data")  # type: ignore[arg-type]
    asked = [asyncio.create_task(one.project_of(entry)) for _ in range(20)]
    await begun()
    asked.pop().cancel()
    store.gate.set()
    assert {(await task).digest for task in asked} == {entry.digest}
    assert store.reads == ["a"]
    assert (await one.project_of(entry)).path == tmp_path / "data" / "projects" / entry.digest
    assert store.reads == ["a"]


async def test_few_archives_are_in_memory_at_a_time(tmp_path: Path, store: Any) -> None:
    entries = [published(tmp_path, store, name) for name in "abcde"]
    one = Catalog(None, store, tmp_path / "data")  # type: ignore[arg-type]
    asked = [asyncio.create_task(one.project_of(entry)) for entry in entries]
    await begun()
    store.gate.set()
    assert [(await task).digest for task in asked] == [entry.digest for entry in entries]
    assert store.most == catalog._UNPACKS


async def test_a_first_create_that_fails_does_not_fail_later_ones(
    tmp_path: Path, store: Any
) -> None:
    entry = published(tmp_path, store, "a")
    one = Catalog(None, store, tmp_path / "data")  # type: ignore[arg-type]
    store.gate.set()
    store.failure = ArtifactDamaged("it is damaged")
    with pytest.raises(ArtifactDamaged):
        await one.project_of(entry)
    store.failure = None
    assert (await one.project_of(entry)).digest == entry.digest


async def test_the_event_loop_neither_unpacks_nor_reads_a_project(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the calls of all owners."""
    threads: list[int] = []
    unpack, load = project.unpack, project.load

    def unpacking(archive: bytes, digest: str, directory: Path) -> Path:
        threads.append(threading.get_ident())
        return unpack(archive, digest, directory)

    def loading(path: str | Path) -> Project:
        threads.append(threading.get_ident())
        return load(path)

    entry = published(tmp_path, store, "a")
    store.gate.set()
    monkeypatch.setattr(project, "unpack", unpacking)
    monkeypatch.setattr(project, "load", loading)
    await Catalog(None, store, tmp_path / "data").project_of(entry)  # type: ignore[arg-type]
    assert len(threads) == 2
    assert threading.get_ident() not in threads
