"""The census reads the process table, and counts nothing that is not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_ray.engines import census
from aenv_ray.engines.census import live_processes

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")


def test_a_directory_without_a_launcher_has_no_processes(tmp_path: Path) -> None:
    assert live_processes(tmp_path) == []


def test_this_process_and_its_parent_are_no_sandboxes() -> None:
    assert not {os.getpid(), os.getppid()} & set(live_processes())


@needs_proc
def test_the_process_table_has_this_process() -> None:
    found = census._processes()[os.getpid()]
    assert found.parent == os.getppid()
    assert found.pid_namespaces >= 1
    assert found.state in "RSD"


def process(pid: int, parent: int, depth: int = 1, name: str = "python", state: str = "S") -> None:
    _TABLE[pid] = census._Process(pid, parent, state, name, depth)


_TABLE: dict[int, census._Process] = {}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> int:
    _TABLE.clear()
    process(1, 0)
    process(10, 1)
    monkeypatch.setattr(census, "_processes", lambda: _TABLE)
    monkeypatch.setattr(census, "_is_launcher", lambda pid, directory: pid == 10)
    return 10


def test_templates_and_spares_are_no_instances(launcher: int) -> None:
    process(20, launcher)  # a template without a jail
    process(21, 20)  # its instance
    process(22, 20, name="aenv-spare")
    process(23, 21, name="bash")  # what the instance started
    assert sorted(live_processes()) == [21, 23]


def test_a_template_in_a_jail_is_one_namespace_deeper(launcher: int) -> None:
    process(20, launcher)
    process(21, 20, depth=2)
    process(22, 21, depth=3)
    process(23, 22, depth=3, name="sleep")
    assert sorted(live_processes()) == [22, 23]


def test_the_dead_and_the_foreign_are_not_counted(launcher: int) -> None:
    process(20, launcher)
    process(21, 20, state="Z")
    process(30, 1)
    process(31, 30)
    assert live_processes() == []
