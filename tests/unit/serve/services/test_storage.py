"""Parts of storage without Ray: names, paths, placement, orphan sandboxes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.controller.placement import HostLoad, on_nodes
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.engines.node.local_storage import LocalStorage
from aenv_ray.errors import CatalogConflict, ConfigError, FabricUnavailable
from aenv_ray.hub.storages import StorageRecord
from aenv_ray.project.config import DeployChanges, EnvironmentConfig
from aenv_ray.project.storage import (
    StorageMount,
    check_mount_path,
    parse_size,
    shown_size,
    storage_name,
)
from aenv_ray.serve.services import sandbox as service_sandbox
from aenv_ray.serve.services import storage as service_storage
from aenv_ray.serve.services.sandbox import OrphanSandboxes
from tests.fake_clock import FakeClock

# --- names, paths, sizes -------------------------------------------------------------------------

_OWNERS = st.text(max_size=8)


@given(_OWNERS, st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True), _OWNERS)
def test_a_storage_name_is_valid_for_directories_and_claims(
    owner: str, service: str, label: str
) -> None:
    name = storage_name(owner, service, label)
    mount = StorageMount(name=name, uid="0" * 16, mount_path="/data", size_bytes=1)
    assert len(mount.name) <= 63
    assert not mount.name.endswith("-")


@given(st.sets(st.tuples(_OWNERS, _OWNERS.filter(lambda t: "\0" not in t)), min_size=2, max_size=8))
def test_different_owners_and_services_have_different_storage_names(
    pairs: set[tuple[str, str]],
) -> None:
    pairs = {(owner, service) for owner, service in pairs if "\0" not in owner}
    assert len({storage_name(owner, service) for owner, service in pairs}) == len(pairs)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "//", "data", "./data", "/data/..", "/data/../etc", "/data//x", "/data/./x",
        "//data", "/proc", "/proc/self", "/sys/x", "/dev/shm", "/etc", "/usr/lib/x", "/run/x",
        "/bin", "/.box", "/.storage/data", "/project", "/home", "/home/agent", "/home/agent/",
        "/tmp", "/var", "/var/tmp", "/root", "/a:b", "/a,b", "/a\nb", "/a\0b", "/a\\b",
        "/" + "a" * 200,
    ],
)  # fmt: skip
def test_mount_paths_that_a_sandbox_needs_are_rejected(path: str) -> None:
    with pytest.raises(ConfigError):
        check_mount_path(path)


@pytest.mark.parametrize(
    "path", ["/data", "/home/admin/data", "/home/agent/kept", "/tmp/x", "/var/lib/x", "/srv/a b"]
)
def test_other_mount_paths_are_accepted(path: str) -> None:
    assert check_mount_path(f"{path}/") == path


@given(st.integers(1, 1 << 50))
def test_a_size_is_shown_exactly(size: int) -> None:
    assert parse_size(shown_size(size)) == size


def test_changes_do_not_modify_the_original() -> None:
    config = EnvironmentConfig.model_validate({"name": "x", "deployConfig": {"ports": [80]}})
    changes = DeployChanges(cpu="2", memory="1Gi", image="one:1", port=8000)
    deploy = changes.made_to(config).deploy
    assert (deploy.cpu, deploy.memory, deploy.ports) == ("2", "1Gi", (80, 8000))
    assert deploy.container.image == "one:1"
    assert config.deploy.ports == (80,)
    assert DeployChanges().made_to(config) == config


# --- directories ---------------------------------------------------------------------------------


def test_a_storage_larger_than_the_free_disk_space_is_rejected(tmp_path: Path) -> None:
    """No quota limits a directory; an existing one already has its data on the disk."""
    storage = LocalStorage(tmp_path)
    wanted = StorageMount(name="aenv-desk-1", uid="1" * 16, mount_path="/data", size_bytes=1 << 60)
    with pytest.raises(FabricUnavailable, match=r"of 1048576Ti does not fit: .* has \d+Mi free"):
        storage.open(wanted)
    small = wanted.model_copy(update={"size_bytes": 1})
    made = storage.open(small).data
    grown = {"is_made": True, "size_bytes": shutil.disk_usage(tmp_path).total}
    assert storage.open(small.model_copy(update=grown)).data == made
    with pytest.raises(FabricUnavailable, match=r"does not fit: .* in total"):
        storage.open(wanted.model_copy(update={"is_made": True}))


# --- places --------------------------------------------------------------------------------------

MOUNT = StorageMount(name="aenv-desk-1", uid="1" * 16, mount_path="/data", size_bytes=1)


class Kept:
    """The records of one storage."""

    def __init__(self, **facts: Any) -> None:
        self.record: StorageRecord | None = StorageRecord(
            name=MOUNT.name, uid=MOUNT.uid, owner="ann", service="desk", size_bytes=1,
            engine="process", created_at=1.0, **facts,
        )  # fmt: skip

    async def get(self, name: str) -> StorageRecord | None:
        assert name == MOUNT.name
        return self.record

    async def choose_machine(self, record: StorageRecord, machine: str) -> str:
        self.record = record.model_copy(update={"machine": record.machine or machine})
        return self.record.machine


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, NodeFacts]:
    """Two machines; the second has two nodes, and this process is on one of them."""
    known = {
        "a": NodeFacts(4, machine="one"), "b": NodeFacts(4, machine="two"),
        "c": NodeFacts(4, machine="two"),
    }  # fmt: skip
    around = SimpleNamespace(alive_nodes=lambda: known, node_id=lambda: "b")
    monkeypatch.setattr(service_storage, "ray_api", around)
    given_settings(monkeypatch)
    return known


def given_settings(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    own = SimpleNamespace(
        **{"storage_dir": None, "pod_name": None, "is_in_kuberay": False, **fields}
    )
    monkeypatch.setattr(service_storage, "settings", lambda: own)


async def placed(kept: Any, engine: str = "process") -> tuple[StorageMount, tuple[str, ...]]:
    return await service_storage.placed(kept, MOUNT, engine)


async def test_a_local_directory_ties_a_service_to_its_machine(nodes: dict[str, NodeFacts]) -> None:
    kept = Kept()
    assert await placed(kept) == (MOUNT, ("b", "c"))
    assert kept.record is not None
    assert kept.record.machine == "two"
    assert await placed(Kept(machine="one", is_made=True)) == (
        MOUNT.model_copy(update={"is_made": True}),
        ("a",),
    )
    del nodes["a"]
    with pytest.raises(FabricUnavailable, match="machine one"):
        await placed(Kept(machine="one"))
    nodes.clear()
    with pytest.raises(FabricUnavailable, match="no node"):
        await placed(Kept())


async def test_a_shared_directory_ties_a_service_to_no_machine(
    nodes: dict[str, NodeFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    del nodes
    assert await placed(Kept(), "kubernetes") == (MOUNT, ())
    given_settings(monkeypatch, storage_dir="/shared")
    assert await placed(Kept()) == (MOUNT, ())


@pytest.mark.parametrize("in_pod", [{"pod_name": "worker-1"}, {"is_in_kuberay": True}])
async def test_the_disk_of_a_pod_is_rejected(
    nodes: dict[str, NodeFacts], monkeypatch: pytest.MonkeyPatch, in_pod: dict[str, Any]
) -> None:
    """Its data would be deleted with the pod."""
    del nodes
    given_settings(monkeypatch, **in_pod)
    with pytest.raises(ConfigError, match="deleted with the pod"):
        await placed(Kept())


async def test_a_storage_being_deleted_cannot_be_used(nodes: dict[str, NodeFacts]) -> None:
    del nodes
    gone = Kept()
    gone.record = None
    for kept in (Kept(is_leaving=True), gone):
        with pytest.raises(CatalogConflict):
            await placed(kept)


def test_hosts_of_a_machine_are_those_of_its_nodes() -> None:
    hosts = [HostLoad(f"h-{node}", node, 0) for node in "abc"]
    assert on_nodes(hosts, ()) == hosts
    assert [host.node_id for host in on_nodes(hosts, ("b", "x"))] == ["b"]
    assert on_nodes([], ("b",)) == []
    with pytest.raises(FabricUnavailable):
        on_nodes(hosts, ("x",))


# --- what replicas left --------------------------------------------------------------------------


class Left:
    """The sandboxes of a service, with the names of their replicas."""

    def __init__(self, **sandboxes: str) -> None:
        self.there = sandboxes
        self.living = {"me", "other"}
        self.clock = FakeClock()
        self.asked = 0
        self.sandboxes = OrphanSandboxes("me", self._list, self._release, self._is_alive)

    async def _list(self) -> dict[str, str]:
        self.asked += 1
        return dict(self.there)

    async def _release(self, ids: Any) -> None:
        for one in ids:
            del self.there[one]

    async def _is_alive(self, name: str) -> bool:
        return name in self.living


async def test_only_sandboxes_of_dead_replicas_are_ended() -> None:
    left = Left(a="me", b="other", c="dead", d="")
    assert await left.sandboxes.end() == ["b", "d"]
    assert left.there == {"b": "other", "d": ""}


async def test_a_new_replica_waits_until_the_old_one_releases_the_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_sandbox, "_POLL_S", 0.001)
    left = Left(b="other")
    with pytest.raises(FabricUnavailable, match="b has the storage"):
        await left.sandboxes.end_all(_Hasty(), 3.0)
    assert left.there == {"b": "other"}  # its calls go on
    left.living.remove("other")
    await left.sandboxes.end_all(_Hasty(), 3.0)
    assert left.there == {}


class _Hasty(FakeClock):
    """A clock that advances at every reading."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()
