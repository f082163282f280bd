"""Every store of instance records keeps its contract."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import FileInstanceStore, InstanceStore
from aenv_ray.ids import InstanceId
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.contract.hub.store_contract import InstanceStoreContract, record


class TestMemoryInstanceStore(InstanceStoreContract):
    is_durable = False

    @pytest.fixture
    def open_store(self) -> Callable[[], InstanceStore]:
        return MemoryInstanceStore


class TestFileInstanceStore(InstanceStoreContract):
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "deep" / "records"

    @pytest.fixture
    def open_store(self, directory: Path) -> Callable[[], InstanceStore]:
        return lambda: FileInstanceStore(directory)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"\xff\x00", b'{"spec": 1}', b"null", b"[" * 100_000]
    )
    def test_a_file_that_cannot_be_read_is_skipped(
        self, store: InstanceStore, directory: Path, content: bytes
    ) -> None:
        """A record of another version, or a truncated one: its sandbox is ended as an orphan."""
        store.put([record("good"), record("torn")])
        torn = next(p for p in directory.glob("*.json") if b'"torn"' in p.read_bytes())
        torn.write_bytes(content)
        assert [kept.id for kept in store.list()] == ["good"]
        assert store.get(InstanceId("torn")) is None
        store.put([record("torn")])
        assert store.get(InstanceId("torn")) == record("torn")

    def test_a_failed_write_leaves_the_old_record_and_no_temporary_file(
        self, store: InstanceStore, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put([record("kept", generation=1)])

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(FabricUnavailable, match="No space") as raised:
            store.put([record("kept", generation=2)])
        assert str(directory) in raised.value.message
        monkeypatch.undo()
        kept = store.get(InstanceId("kept"))
        assert kept is not None
        assert kept.generation == 1
        assert len(list(directory.iterdir())) == 1

    def test_a_record_that_cannot_be_deleted_is_logged(
        self, store: InstanceStore, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its sandbox is gone: nothing else may fail because of it."""
        store.put([record("kept")])
        (path,) = directory.iterdir()
        path.unlink()
        path.mkdir()
        store.delete([InstanceId("kept")])
        assert "kept cannot be deleted" in caplog.text

    def test_records_are_private(self, store: InstanceStore, directory: Path) -> None:
        """Invariant 10: they hold the caller's variables."""
        store.put([record()])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "KEY" not in repr(record())
