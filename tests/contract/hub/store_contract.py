"""The contract of `aenv_ray.hub.store.InstanceStore` as a test class; every store passes it.

    class TestMyStore(InstanceStoreContract):
        @pytest.fixture
        def open_store(self):
            return lambda: MyStore(...)

Needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceRecord,
    InstanceSpec,
    Isolation,
)

ODD_IDS = (
    "env-abc", "../../etc/passwd", "/absolute", "a\nb", "ü-ß", "", ".", "x" * 500, "a:b*c?d",
    "CON", "case-A", "case-a",
)  # fmt: skip
"""Ids come from callers; none may name a file or a key elsewhere, nor meet another's."""


def record(instance_id: str = "env-abc", **fields: Any) -> InstanceRecord:
    """Return a record of an instance; `fields` are those of `InstanceRecord`."""
    spec = InstanceSpec(
        instance_id=InstanceId(instance_id), reference="env@1.0.0", digest="d" * 64, ttl_s=60.0,
        environment_variables={"KEY": "ü\0\n"}, arguments=("--a", ""), labels={"l": "1"},
        owner="somebody", idle_timeout_s=5.0, datasource="s3://x", job_id="j1",
    )  # fmt: skip
    values: dict[str, Any] = {
        "spec": spec, "host_id": HostId("host-1"), "node_id": "node", "created_at": 1.5,
        "density": ActorDensity.SHARED, "deadline": 1e9 + 0.123456, "start_mode": "template",
        "isolation": Isolation(kind="namespaces", namespaces=("user",), limits={"a": "b"}),
        "generation": 3,
    }  # fmt: skip
    return InstanceRecord(**{**values, **fields})


class InstanceStoreContract:
    """Every guarantee of the instance store; subclass it for a store."""

    is_durable = True
    """Whether what was written is there when the store is opened again."""

    @pytest.fixture
    def open_store(self) -> Callable[[], InstanceStore]:
        """Return what opens the same store; each call a new object."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: Callable[[], InstanceStore]) -> InstanceStore:
        """Return the store, empty."""
        return open_store()

    def test_a_record_is_read_back_unchanged(self, store: InstanceStore) -> None:
        store.put([record()])
        assert store.get(InstanceId("env-abc")) == record()
        assert store.list() == [record()]

    def test_a_missing_record_is_none(self, store: InstanceStore) -> None:
        assert store.get(InstanceId("env-abc")) is None
        assert store.list() == []
        assert store.list(HostId("host-1")) == []

    def test_writing_again_replaces(self, store: InstanceStore) -> None:
        store.put([record()])
        store.put([record(deadline=2e9, generation=4)])
        (kept,) = store.list()
        assert (kept.deadline, kept.generation) == (2e9, 4)

    def test_deletion_ignores_unknown_ids(self, store: InstanceStore) -> None:
        store.put([record("a"), record("b")])
        store.delete([InstanceId("a"), InstanceId("never")])
        store.delete([InstanceId("a")])
        store.delete([])
        store.put([])
        assert [kept.id for kept in store.list()] == ["b"]
        assert store.get(InstanceId("a")) is None

    def test_records_are_listed_by_host_oldest_first(self, store: InstanceStore) -> None:
        store.put(
            [
                record("late", created_at=30.0),
                record("other", host_id=HostId("host-2"), created_at=20.0),
                record("early", created_at=10.0),
            ]
        )
        assert [kept.id for kept in store.list(HostId("host-1"))] == ["early", "late"]
        assert [kept.id for kept in store.list(HostId("host-2"))] == ["other"]
        assert [kept.id for kept in store.list()] == ["early", "other", "late"]
        assert store.list(HostId("host-")) == []

    def test_odd_ids_are_handled_like_others(self, store: InstanceStore) -> None:
        store.put([record(odd) for odd in ODD_IDS])
        for odd in ODD_IDS:
            kept = store.get(InstanceId(odd))
            assert kept is not None
            assert kept.id == odd
        assert len(store.list()) == len(ODD_IDS)
        store.delete([InstanceId(odd) for odd in ODD_IDS[1:]])
        assert [kept.id for kept in store.list()] == [ODD_IDS[0]]

    def test_records_survive_reopening(self, open_store: Callable[[], InstanceStore]) -> None:
        """Invariant 5."""
        if not self.is_durable:
            pytest.skip("this store says that it keeps nothing")
        open_store().put([record("a"), record("b")])
        second = open_store()
        second.delete([InstanceId("a")])
        assert [kept.id for kept in open_store().list()] == ["b"]

    def test_the_engines_of_a_host_are_kept_until_it_is_forgotten(
        self, store: InstanceStore
    ) -> None:
        """Invariant 3: where to look for what a host made and did not come to record."""
        one, two = HostId("host-1"), HostId("../host/2")
        assert store.engines_used() == {}
        for engine in ("docker", "process", "docker"):
            store.note_engine(one, engine)
        store.note_engine(two, "process")
        store.put([record()])
        both = frozenset({"docker", "process"})
        assert store.engines_used() == {one: both, two: frozenset({"process"})}
        store.forget_host(one)
        store.forget_host(one)
        store.forget_host(HostId("never"))
        assert store.engines_used() == {two: frozenset({"process"})}
        assert [kept.id for kept in store.list()] == ["env-abc"]

    def test_the_engines_of_a_host_survive_reopening(
        self, open_store: Callable[[], InstanceStore]
    ) -> None:
        """Invariant 5."""
        if not self.is_durable:
            pytest.skip("this store says that it keeps nothing")
        open_store().note_engine(HostId("host-1"), "docker")
        open_store().note_engine(HostId("host-1"), "process")
        both = frozenset({"docker", "process"})
        assert open_store().engines_used() == {HostId("host-1"): both}

    def test_concurrent_readers_see_whole_records(self, store: InstanceStore) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(30):
                    store.put([record("shared", generation=turn), record(f"own-{number}-{turn}")])
                    kept = store.get(InstanceId("shared"))
                    assert kept is not None
                    store.list()
                    store.delete([InstanceId(f"own-{number}-{turn}")])
            except BaseException as exc:  # noqa: BLE001  # told to the test's own thread
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [kept.id for kept in store.list()] == ["shared"]
