"""The directory of a node: its records live as long as the node, and nothing outlives it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.node.directory import (
    STALE_AFTER_S,
    has_live_owner,
    remove_stale,
    set_owner,
    vacate,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A node's directory with a launcher's files and a host's record."""
    path = tmp_path / "node"
    (path / "s").mkdir(parents=True)
    (path / "records").mkdir()
    (path / "records" / "one.json").write_text("{}")
    (path / "lock").touch()
    (path / "launcher.log").touch()
    return path


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(30)
    return process.pid


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(30)


def test_records_outlive_a_launcher_while_their_node_lives(directory: Path) -> None:
    """Invariant 3: containers run on when an idle launcher exits."""
    set_owner(directory, os.getpid())
    vacate(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "owner", "records"]
    remove_stale(directory.parent)
    assert (directory / "records" / "one.json").exists()


def test_everything_goes_with_the_owner(
    directory: Path, neighbour: subprocess.Popen[bytes]
) -> None:
    set_owner(directory, neighbour.pid)
    assert has_live_owner(directory)
    neighbour.kill()
    neighbour.wait(30)
    assert not has_live_owner(directory)
    vacate(directory)
    assert not directory.exists()


def test_what_a_dead_node_left_is_removed_at_once(directory: Path, gone: int) -> None:
    """Also where no launcher ever ran, as on a node that has only containers."""
    (directory / "lock").unlink()
    set_owner(directory, gone)
    remove_stale(directory.parent)
    assert not directory.exists()


def test_a_later_process_with_the_owners_number_is_not_the_owner(directory: Path) -> None:
    set_owner(directory, os.getpid())
    owner = directory / "owner"
    owner.write_text(f'[{os.getpid()}, "1"]')
    assert not has_live_owner(directory)


@pytest.mark.parametrize(("age_s", "stays"), [(0.0, True), (STALE_AFTER_S + 5.0, False)])
def test_a_directory_without_owner_gets_time_for_its_launcher(
    directory: Path, age_s: float, stays: bool
) -> None:
    lock = directory / "lock"
    changed = lock.stat().st_mtime - age_s
    os.utime(lock, (changed, changed))
    remove_stale(directory.parent)
    assert directory.exists() is stays
