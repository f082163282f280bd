"""Which containers the janitor ends, and which it leaves alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.docker import firewall
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.janitor import (
    CHECKS_S,
    COUNTS,
    FASTEST_WRITE,
    IDLE_EXIT_S,
    REMOVAL_GRACE_S,
    STORAGE_SLACK_BYTES,
    TTL_PASSED,
    ContainerJanitor,
    JanitorClient,
    disk_use,
)
from aenv_ray.engines.docker.names import container_name, sidecar_name
from aenv_ray.files import FileLock
from tests.fake_clock import FakeClock

GRACE_S = 30.0


class FakeDaemon(JanitorClient):
    """Has the containers that a test puts there."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.rows: list[dict[str, Any]] = []
        self.volumes: set[str] = set()
        self.written: dict[str, int] = {}
        self.looks: list[str] = []
        self.bridges: dict[str, dict[str, str]] = {}
        self.used_bridges: set[str] = set()

    def put(self, name: str, deadline: float, state: str = "running", **labels: str) -> None:
        own = {"aenv.scope": "ours", "aenv.host": "host", "aenv.deadline": repr(deadline)}
        row = {"Id": name, "Names": [f"/{name}"], "State": state, "Labels": own | labels}
        self.rows.append(row)

    def names(self) -> list[str]:
        return [row["Id"] for row in self.rows]

    def containers(self, label: str) -> list[dict[str, Any]]:
        name, _, value = label.partition("=")
        return [
            r
            for r in self.rows
            if r["Labels"].get(name) in ((value,) if value else (r["Labels"].get(name),))
        ]

    def remove(self, container: str) -> bool:
        self.rows = [row for row in self.rows if row["Id"] != container]
        return True

    def written_bytes(self, container: str, within_s: float) -> int:
        self.looks.append(container)
        return self.written.get(container, 0)

    def remove_volume(self, name: str) -> None:
        if name not in self._used():
            self.volumes.discard(name)

    def unused_volumes(self, label: str) -> set[str]:
        return self.volumes - self._used()

    def networks(self, label: str) -> list[dict[str, Any]]:
        return [{"Id": name, "Labels": labels} for name, labels in self.bridges.items()]

    def remove_network(self, network: str) -> bool:
        return network not in self.used_bridges and bool(self.bridges.pop(network, True))

    def _used(self) -> set[str]:
        return {row["Labels"].get("aenv.volume") for row in self.rows}


@pytest.fixture
def files(tmp_path: Path) -> DockerFiles:
    files = DockerFiles(tmp_path)
    files.prepare()
    return files


@pytest.fixture
async def present(files: DockerFiles) -> AsyncIterator[None]:
    with await files.locks.enter_host("host"):
        yield


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def janitor(files: DockerFiles, daemon: FakeDaemon, clock: FakeClock) -> ContainerJanitor:
    return ContainerJanitor("ours", files, daemon, clock, GRACE_S)


def test_a_container_past_its_deadline_ends_and_its_host_can_read_why(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    present: None,
) -> None:
    daemon.put("aenv-a", clock.now() + 5.0)
    daemon.put("aenv-b", clock.now() + 5.0)
    files.set_deadline("aenv-b", clock.now() + 50.0)
    janitor.sweep()
    assert daemon.names() == ["aenv-a", "aenv-b"]
    clock.advance(5.0)
    janitor.sweep()
    assert daemon.names() == ["aenv-b"]
    assert files.cause("aenv-a") == TTL_PASSED
    assert files.cause("aenv-b") is None


async def test_a_host_that_comes_back_in_time_keeps_its_containers(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, files: DockerFiles
) -> None:
    daemon.put("aenv-a", clock.now() + 1000.0)
    janitor.sweep()
    clock.advance(GRACE_S)
    janitor.sweep()
    with await files.locks.enter_host("host"):
        clock.advance(GRACE_S)
        janitor.sweep()
    clock.advance(1.0)
    janitor.sweep()
    clock.advance(GRACE_S)
    janitor.sweep()
    assert daemon.names() == ["aenv-a"]
    clock.advance(1.0)
    janitor.sweep()
    assert daemon.names() == []
    assert files.names() == set(), "without a host, the janitor cleans up"


def test_an_exited_container_is_left_to_its_host_for_a_while(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    daemon.put("aenv-a", clock.now() + 1000.0, state="exited")
    janitor.sweep()
    clock.advance(REMOVAL_GRACE_S)
    janitor.sweep()
    assert daemon.names() == ["aenv-a"]
    clock.advance(1.0)
    janitor.sweep()
    assert daemon.names() == []


def test_containers_of_other_scopes_end_only_if_overdue_and_without_a_janitor(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, tmp_path: Path, present: None
) -> None:
    watched = DockerFiles(tmp_path / "watched")
    watched.directory.mkdir()
    watched.prepare()
    lock = FileLock.acquire(watched.locks.janitor, 1.0)
    late, early = clock.now() - 1.0, clock.now() + 1.0
    theirs = {"aenv.scope": "theirs"}
    daemon.put("watched", late, **theirs, **{"aenv.directory": str(watched.directory)})
    daemon.put("alive", early, **theirs, **{"aenv.directory": str(tmp_path / "gone")})
    daemon.put("overdue", late, **theirs, **{"aenv.directory": str(tmp_path / "gone")})
    daemon.rows.append({"Id": "foreign", "Names": ["/foreign"], "State": "exited", "Labels": {}})
    janitor.sweep()
    lock.close()
    assert daemon.names() == ["watched", "alive", "foreign"]


def test_files_without_a_container_are_removed_after_a_while(
    janitor: ContainerJanitor, clock: FakeClock, files: DockerFiles, present: None
) -> None:
    files.make_directories("aenv-a", {})
    janitor.sweep()
    clock.advance(IDLE_EXIT_S)
    janitor.sweep()
    assert files.names() == {"aenv-a"}
    clock.advance(1.0)
    janitor.sweep()
    assert files.names() == set()


async def test_it_is_idle_after_a_while_without_hosts_and_containers(
    janitor: ContainerJanitor, clock: FakeClock, files: DockerFiles
) -> None:
    with await files.locks.enter_host("host"):
        clock.advance(2 * IDLE_EXIT_S)
        janitor.sweep()
        assert not janitor.is_idle
    clock.advance(IDLE_EXIT_S + 1.0)
    janitor.sweep()
    assert janitor.is_idle


async def test_a_host_is_present_while_any_of_its_locks_is_held(files: DockerFiles) -> None:
    locks = files.locks
    one, two = [await locks.enter_host("host") for _ in range(2)]
    one.close()
    locks.forget_absent_hosts()
    assert locks.is_present("host")
    two.close()
    assert not locks.is_present("host")
    locks.forget_absent_hosts()
    assert not locks.has_hosts


def _put_pair(daemon: FakeDaemon, deadline: float, state: str = "running") -> None:
    daemon.volumes.add("aenv-a-shared")
    shared = {"aenv.volume": "aenv-a-shared"}
    daemon.put("aenv-a", deadline, state, **shared)
    daemon.put(sidecar_name("aenv-a"), deadline, **shared, **{"aenv.sidecar-of": "x-1"})


def test_container_and_sidecar_end_together_with_their_volume(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    _put_pair(daemon, clock.now() + 5.0)
    clock.advance(5.0)
    janitor.sweep()
    assert (daemon.names(), daemon.volumes) == ([], set())


def test_a_sidecar_does_not_outlive_its_main_container(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    _put_pair(daemon, clock.now() + 1000.0, state="exited")
    janitor.sweep()
    assert len(daemon.names()) == 2, "its host reads its log first"
    clock.advance(REMOVAL_GRACE_S + 1.0)
    janitor.sweep()
    assert (daemon.names(), daemon.volumes) == ([], set())


def test_an_unused_volume_is_removed_by_the_second_sweep_that_finds_it(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    daemon.volumes.add("aenv-a-shared")
    janitor.sweep()
    assert daemon.volumes, "its container may be about to be created"
    clock.advance(60.0)
    janitor.sweep()
    assert not daemon.volumes


def test_names_differ_by_scope_and_instance() -> None:
    names = {container_name(scope, one) for scope in ("a", "b") for one in ("x-1", "x-2")}
    assert len(names) == 4


def test_a_container_that_writes_too_much_ends_and_its_host_can_read_why(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    present: None,
) -> None:
    """It must not fill the disk of the node."""
    far = clock.now() + 1000.0
    limits = {"aenv.storage-bytes": str(64 << 20)}
    daemon.put("aenv-a", far, **limits)
    daemon.put("aenv-b", far, "created", **limits)
    daemon.put("aenv-c", far)
    daemon.written = {"aenv-a": 64 << 20, "aenv-c": 1 << 40}
    janitor.sweep()
    assert daemon.names() == ["aenv-a", "aenv-b", "aenv-c"], "the limit itself is allowed"
    daemon.written["aenv-a"] += STORAGE_SLACK_BYTES + 1
    janitor.sweep()
    assert daemon.names() == ["aenv-b", "aenv-c"]
    assert "limit 64 MiB: deployConfig.ephemeralStorage" in (files.cause("aenv-a") or "")


def test_a_container_with_too_many_files_to_count_ends(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    monkeypatch: pytest.MonkeyPatch,
    present: None,
) -> None:
    """Invariant 7: it could otherwise write without a limit."""
    limits: list[float] = []

    def count(_: str, within_s: float) -> None:
        limits.append(within_s)

    daemon.put("aenv-a", clock.now() + 1000.0, **{"aenv.storage-bytes": str(64 << 20)})
    monkeypatch.setattr(daemon, "written_bytes", count)
    for _ in range(COUNTS - 1):
        janitor.sweep()
    assert daemon.names() == ["aenv-a"], "the disk may be busy"
    assert limits == [3.0, 3.0]
    janitor.sweep()
    assert daemon.names() == []
    assert "more files than can be counted in 20 s" in (files.cause("aenv-a") or "")


def test_other_users_of_the_node_see_nothing_of_a_scope(tmp_path: Path) -> None:
    """Invariant 8: the files of its containers, and the sockets of their doors."""
    directory = tmp_path / "scope"
    directory.mkdir(mode=0o755)
    DockerFiles(directory).prepare()
    assert [
        path for path in (directory, *directory.rglob("*")) if path.stat().st_mode & 0o077
    ] == []


def test_disk_use_far_below_the_limit_is_checked_rarely(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    """A check makes the daemon walk through everything the container wrote."""
    daemon.put("aenv-a", clock.now() + 1000.0, **{"aenv.storage-bytes": str(4 * FASTEST_WRITE)})
    for _ in range(8):
        janitor.sweep()
        clock.advance(0.5)
    assert daemon.looks == ["aenv-a"]
    daemon.written["aenv-a"] = 4 * FASTEST_WRITE - 1
    for _ in range(3):
        janitor.sweep()
        clock.advance(0.5)
    assert daemon.looks == ["aenv-a"] * 4


async def test_networks_of_allow_lists_are_removed_when_unused(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(firewall, "remove_chains", removed.append)
    daemon.bridges = {"internet": {}} | {
        name: {"aenv.chain": f"AENV-{name}"} for name in ("held", "used", "idle")
    }
    daemon.used_bridges = {"used"}
    held = await files.locks.use_network("AENV-held")
    idle = await files.locks.use_network("AENV-idle")
    files.locks.write_openings("AENV-idle", {("10.0.0.0/8", 0), ("1.2.3.4/32", 443)})
    assert files.locks.openings("AENV-idle") == {("10.0.0.0/8", 0), ("1.2.3.4/32", 443)}
    idle.close()
    janitor.sweep()
    assert sorted(daemon.bridges) == ["held", "internet", "used"]
    assert removed == ["AENV-idle"]
    held.close()
    clock.advance(60.0)
    janitor.sweep()
    assert sorted(daemon.bridges) == ["internet", "used"]
    again = await files.locks.use_network("AENV-idle")
    assert files.locks.openings("AENV-idle") == set(), "its rules were removed with it"
    again.close()


def test_a_volume_is_counted_however_deep_its_directories_are(tmp_path: Path) -> None:
    """Invariant 7: a sandbox that could end the janitor would have no limit and no deadline."""
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deeper", dir_fd=at)
        below = os.open("deeper", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at), "wb") as file:
        file.write(bytes(1 << 20))
    os.close(at)
    found = disk_use([str(tmp_path)], 3.0)
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)
    assert found is not None
    assert found >= 1 << 20


# --- one container must not keep the janitor from the others -----------------------------------


def test_a_container_with_unreadable_labels_keeps_no_other_from_its_end(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    """Invariant 3: everything that is due ends, of this scope and of others."""
    far = clock.now() + 1000.0
    daemon.put("aenv-a", far, **{"aenv.storage-bytes": "x"})
    daemon.put("aenv-b", far, **{"aenv.deadline": "soon"})
    daemon.put("theirs", far, **{"aenv.scope": "theirs", "aenv.deadline": "soon"})
    daemon.put("aenv-due", clock.now())
    daemon.put("aenv-full", far, **{"aenv.storage-bytes": "1"})
    daemon.put("overdue", clock.now(), **{"aenv.scope": "theirs"})
    daemon.written["aenv-full"] = 1 << 30
    janitor.sweep()
    assert daemon.names() == ["aenv-a", "aenv-b", "theirs"]


def test_a_container_ends_even_if_its_cause_cannot_be_recorded(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    monkeypatch: pytest.MonkeyPatch,
    present: None,
) -> None:
    """Invariant 3: the runtime directory may be full."""

    def full(*_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "record_cause", full)
    daemon.put("aenv-a", clock.now())
    daemon.put("aenv-b", clock.now())
    janitor.sweep()
    assert daemon.names() == []


def test_only_the_volume_of_an_instance_is_removed_with_it(
    janitor: ContainerJanitor, daemon: FakeDaemon, clock: FakeClock, present: None
) -> None:
    """Invariant 7: labels of an image become those of its containers, and name any volume."""
    daemon.volumes = {"pgdata", "aenv-a-shared"}
    daemon.put("aenv-a", clock.now(), **{"aenv.volume": "pgdata"})
    janitor.sweep()
    assert daemon.names() == []
    assert daemon.volumes == {"pgdata"}


def test_slow_checks_of_disk_use_delay_no_deadline(
    janitor: ContainerJanitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    present: None,
) -> None:
    """Invariant 3: an agent decides how long counting its files takes."""
    limit = {"aenv.storage-bytes": str(64 << 20)}
    far, looks = clock.now() + 1000.0, list[str]()

    def count(container: str, _: float) -> int | None:
        looks.append(container)
        if not container.startswith("aenv-slow"):
            return 0
        clock.advance(CHECKS_S + 0.5)
        return None

    monkeypatch.setattr(daemon, "written_bytes", count)
    for number in range(3):
        daemon.put(f"aenv-slow{number}", far, **limit)
    daemon.put("aenv-quick", far, **limit)
    daemon.put("aenv-due", clock.now(), **limit)
    janitor.sweep()
    assert "aenv-due" not in daemon.names()
    assert looks == ["aenv-slow0"]
    for _ in range(3):
        janitor.sweep()
    assert looks == ["aenv-slow0", "aenv-slow1", "aenv-slow2", "aenv-quick", "aenv-slow0"]
    for _ in range(5):
        janitor.sweep()
    assert daemon.names() == ["aenv-quick"]
