"""What the janitor of containers ends, and what it leaves alone: decisions by list and clock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.clock import FakeClock
from aenv_ray.engines.docker import firewall as docker_network
from aenv_ray.engines.docker.files import DockerFiles, container_name, second_name
from aenv_ray.engines.docker.janitor import (
    BURIAL_GRACE_S,
    FASTEST_WRITE,
    IDLE_EXIT_S,
    STORAGE_SLACK_BYTES,
    TTL_PASSED,
    Daemon,
    Janitor,
)

GRACE_S = 30.0


class FakeDaemon(Daemon):
    """Has the containers that it is given."""

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

    def written_bytes(self, container: str) -> int:
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
def present(files: DockerFiles) -> Iterator[int]:
    fd = files.enter("host")
    yield fd
    os.close(fd)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def janitor(files: DockerFiles, daemon: FakeDaemon, clock: FakeClock) -> Janitor:
    return Janitor("ours", files, daemon, clock, GRACE_S)


def test_what_is_past_its_deadline_ends_and_its_host_can_read_why(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, files: DockerFiles, present: int
) -> None:
    daemon.put("aenv-a", clock.now() + 5.0)
    daemon.put("aenv-b", clock.now() + 5.0)
    files.move_deadline("aenv-b", clock.now() + 50.0)
    janitor.sweep()
    assert daemon.names() == ["aenv-a", "aenv-b"]
    clock.advance(5.0)
    janitor.sweep()
    assert daemon.names() == ["aenv-b"]
    assert files.cause("aenv-a") == TTL_PASSED
    assert files.cause("aenv-b") is None


def test_a_host_that_comes_back_in_time_keeps_its_containers(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, files: DockerFiles
) -> None:
    daemon.put("aenv-a", clock.now() + 1000.0)
    janitor.sweep()
    clock.advance(GRACE_S)
    janitor.sweep()
    fd = files.enter("host")
    clock.advance(GRACE_S)
    janitor.sweep()
    os.close(fd)
    clock.advance(1.0)
    janitor.sweep()
    clock.advance(GRACE_S)
    janitor.sweep()
    assert daemon.names() == ["aenv-a"]
    clock.advance(1.0)
    janitor.sweep()
    assert daemon.names() == []
    assert files.names() == set(), "nobody is there who would clean up"


def test_a_dead_container_is_left_to_its_host_for_a_while(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, present: int
) -> None:
    daemon.put("aenv-a", clock.now() + 1000.0, state="exited")
    janitor.sweep()
    clock.advance(BURIAL_GRACE_S)
    janitor.sweep()
    assert daemon.names() == ["aenv-a"]
    clock.advance(1.0)
    janitor.sweep()
    assert daemon.names() == []


def test_containers_of_others_are_left_alone_unless_they_are_overdue_and_unwatched(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, tmp_path: Path, present: int
) -> None:
    watched = DockerFiles(tmp_path / "watched")
    watched.directory.mkdir()
    watched.prepare()
    lock = os.open(watched.janitor_lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    late, early = clock.now() - 1.0, clock.now() + 1.0
    theirs = {"aenv.scope": "theirs"}
    daemon.put("watched", late, **theirs, **{"aenv.directory": str(watched.directory)})
    daemon.put("alive", early, **theirs, **{"aenv.directory": str(tmp_path / "gone")})
    daemon.put("overdue", late, **theirs, **{"aenv.directory": str(tmp_path / "gone")})
    daemon.rows.append({"Id": "foreign", "Names": ["/foreign"], "State": "exited", "Labels": {}})
    janitor.sweep()
    os.close(lock)
    assert daemon.names() == ["watched", "alive", "foreign"]


def test_files_without_a_container_go_after_a_while(
    janitor: Janitor, clock: FakeClock, files: DockerFiles, present: int
) -> None:
    files.make_run_directory("aenv-a")
    janitor.sweep()
    clock.advance(IDLE_EXIT_S)
    janitor.sweep()
    assert files.names() == {"aenv-a"}
    clock.advance(1.0)
    janitor.sweep()
    assert files.names() == set()


def test_it_is_idle_when_nobody_was_there_for_a_while(
    janitor: Janitor, clock: FakeClock, files: DockerFiles
) -> None:
    fd = files.enter("host")
    clock.advance(2 * IDLE_EXIT_S)
    janitor.sweep()
    assert not janitor.is_idle
    os.close(fd)
    clock.advance(IDLE_EXIT_S + 1.0)
    janitor.sweep()
    assert janitor.is_idle


def test_presence_is_a_lock_and_its_mark_goes_with_it(files: DockerFiles) -> None:
    one, two = files.enter("host"), files.enter("host")
    os.close(one)
    files.forget_absent_hosts()
    assert files.is_present("host")
    os.close(two)
    assert not files.is_present("host")
    files.forget_absent_hosts()
    assert not files.has_hosts


def _put_pair(daemon: FakeDaemon, deadline: float, state: str = "running") -> None:
    daemon.volumes.add("aenv-a-shared")
    shared = {"aenv.volume": "aenv-a-shared"}
    daemon.put("aenv-a", deadline, state, **shared)
    daemon.put(second_name("aenv-a"), deadline, **shared, **{"aenv.second-of": "x-1"})


def test_two_containers_end_together_and_take_their_volume_along(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, present: int
) -> None:
    _put_pair(daemon, clock.now() + 5.0)
    clock.advance(5.0)
    janitor.sweep()
    assert (daemon.names(), daemon.volumes) == ([], set())


def test_a_second_container_does_not_outlive_its_first(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, present: int
) -> None:
    _put_pair(daemon, clock.now() + 1000.0, state="exited")
    janitor.sweep()
    assert len(daemon.names()) == 2, "its host wants its last words"
    clock.advance(BURIAL_GRACE_S + 1.0)
    janitor.sweep()
    assert (daemon.names(), daemon.volumes) == ([], set())


def test_a_volume_whose_containers_somebody_removed_goes_at_the_second_look(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, present: int
) -> None:
    daemon.volumes.add("aenv-a-shared")
    janitor.sweep()
    assert daemon.volumes, "its container may just be being made"
    clock.advance(60.0)
    janitor.sweep()
    assert not daemon.volumes


def test_names_differ_by_scope_and_instance() -> None:
    names = {container_name(scope, one) for scope in ("a", "b") for one in ("x-1", "x-2")}
    assert len(names) == 4


def test_what_has_written_more_than_it_may_ends_and_its_host_can_read_why(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, files: DockerFiles, present: int
) -> None:
    """The node's disk is not its own."""
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


def test_what_has_much_room_is_looked_at_seldom(
    janitor: Janitor, daemon: FakeDaemon, clock: FakeClock, present: int
) -> None:
    """A look costs the daemon a walk through what was written."""
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


def test_networks_of_lists_go_when_nobody_is_on_them_or_about_to_be(
    janitor: Janitor,
    daemon: FakeDaemon,
    clock: FakeClock,
    files: DockerFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(docker_network, "remove_chains", removed.append)
    daemon.bridges = {"internet": {}} | {
        name: {"aenv.chain": f"AENV-{name}"} for name in ("held", "used", "idle")
    }
    daemon.used_bridges = {"used"}
    held = files.hold_network("AENV-held")
    idle = files.hold_network("AENV-idle")
    files.note_openings("AENV-idle", {("10.0.0.0/8", 0), ("1.2.3.4/32", 443)})
    assert files.openings("AENV-idle") == {("10.0.0.0/8", 0), ("1.2.3.4/32", 443)}
    os.close(idle)
    janitor.sweep()
    assert sorted(daemon.bridges) == ["held", "internet", "used"]
    assert removed == ["AENV-idle"]
    os.close(held)
    clock.advance(60.0)
    janitor.sweep()
    assert sorted(daemon.bridges) == ["internet", "used"]
    again = files.hold_network("AENV-idle")
    assert files.openings("AENV-idle") == set(), "whoever makes it again sets its rules anew"
    os.close(again)
