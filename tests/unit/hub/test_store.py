"""Both stores of instance records keep the same contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.hub.store import FileInstanceStore, InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceRecord,
    InstanceSpec,
    Isolation,
)
from tests.contract.hub.memory_store import MemoryInstanceStore

ODD_IDS = ["../../etc/passwd", "/etc/passwd", "", "a/b", "ä", "x" * 5000, "\0", ".", "a\nb"]


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> InstanceStore:
    if request.param == "memory":
        return MemoryInstanceStore()
    return FileInstanceStore(tmp_path / "deep" / "records")


def record(
    instance_id: str, host: str = "host-a", created_at: float = 0.0, generation: int = 0
) -> InstanceRecord:
    return InstanceRecord(
        spec=InstanceSpec(
            instance_id=InstanceId(instance_id),
            reference="env@1.0.0",
            digest="d",
            ttl_s=60.0,
            labels={"größe": "klein"},
            environment_variables={"A": "1"},
        ),
        host_id=HostId(host),
        node_id="n",
        density=ActorDensity.SHARED,
        created_at=created_at,
        deadline=created_at + 60.0,
        isolation=Isolation(kind="none", missing=("network: none asked for",)),
        start_mode="template",
        generation=generation,
    )


def test_a_record_comes_back_as_it_was_put(store: InstanceStore) -> None:
    """All of it, the variables too: a restarted host knows nothing else."""
    one = record("env-one")
    store.put([one])
    assert store.get(one.id) == one
    assert store.get(InstanceId("env-two")) is None


def test_a_record_replaces_that_of_the_same_id(store: InstanceStore) -> None:
    store.put([record("env-one"), record("env-two")])
    store.put([record("env-one", generation=1)])
    found = store.get(InstanceId("env-one"))
    assert found is not None
    assert found.generation == 1
    assert len(store.list()) == 2


def test_records_are_listed_by_host_oldest_first(store: InstanceStore) -> None:
    store.put([record("env-c", created_at=3.0), record("env-a", created_at=1.0)])
    store.put([record("env-b", "host-b", created_at=2.0)])
    assert [r.id for r in store.list()] == ["env-a", "env-b", "env-c"]
    assert [r.id for r in store.list(HostId("host-a"))] == ["env-a", "env-c"]
    assert store.list(HostId("host-x")) == []


def test_deleting_is_safe_any_number_of_times(store: InstanceStore) -> None:
    """Invariant 4."""
    store.put([record("env-one"), record("env-two")])
    for _ in range(2):
        store.delete([InstanceId("env-one"), InstanceId("never")])
    assert [r.id for r in store.list()] == ["env-two"]
    store.delete([])
    store.put([])


@pytest.mark.parametrize("instance_id", ODD_IDS)
def test_an_odd_id_is_only_an_id(store: InstanceStore, instance_id: str) -> None:
    """Invariant 7: an id comes from a caller and names no file of its choice."""
    assert store.get(InstanceId(instance_id)) is None
    store.delete([InstanceId(instance_id)])
    store.put([record(instance_id), record("env-one")])
    assert store.get(InstanceId(instance_id)) == record(instance_id)
    store.delete([InstanceId(instance_id)])
    assert [r.id for r in store.list()] == ["env-one"]


# --- files ----------------------------------------------------------------------------------------


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    """Invariant 5, on one node: an acknowledged write survives its writer."""
    FileInstanceStore(tmp_path).put([record("env-one")])
    assert FileInstanceStore(tmp_path).list() == [record("env-one")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "{}",
        lambda text: "\ud800",
        lambda text: text.replace("host_id", "other_field"),
        lambda text: "\0" * 100,
    ],
)
def test_a_record_that_cannot_be_read_is_skipped(
    tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    """One bad file does not keep a host from adopting the others."""
    store = FileInstanceStore(tmp_path)
    store.put([record("env-bad")])
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(spoil(path.read_text()).encode(errors="surrogatepass"))
    store.put([record("env-good")])
    assert [r.id for r in store.list()] == ["env-good"]
    assert store.get(InstanceId("env-bad")) is None
    store.put([record("env-bad")])
    assert store.get(InstanceId("env-bad")) == record("env-bad")


def test_what_else_lies_in_the_directory_is_no_record(tmp_path: Path) -> None:
    store = FileInstanceStore(tmp_path)
    (tmp_path / ".partial").write_text("half")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "directory.json").mkdir()
    assert store.list() == []


def test_records_are_private_and_leave_no_partial_files(tmp_path: Path) -> None:
    """Invariant 10: they hold an instance's variables."""
    directory = tmp_path / "records"
    FileInstanceStore(directory).put([record("env-one")])
    (path,) = directory.iterdir()
    assert directory.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    store = FileInstanceStore(tmp_path / "records")
    (tmp_path / "records").rmdir()
    assert store.list() == []
    store.put([record("env-one")])
    assert store.get(InstanceId("env-one")) == record("env-one")
