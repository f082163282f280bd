"""Counting sandboxes from a process table alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.engines import live_sandboxes

LAUNCHER, TEMPLATE, JAILER, INNER = 10, 20, 21, 22
PLACE = Path("/run/node")

Table = Callable[..., None]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Make a process table of rows of pid, parent, state, name and depth in pid namespaces.

    The state of a process whose main thread has ended before another is "Z2".
    """
    monkeypatch.setattr(live_sandboxes, "_PROC", str(tmp_path))

    def make(*rows: tuple[int, int, str, str, int]) -> None:
        for pid, parent, state, name, depth in rows:
            entry = tmp_path / str(pid)
            entry.mkdir()
            threads = state[1:] or "1"
            unused = " 0" * 15
            (entry / "stat").write_text(
                f"{pid} ({name}) {state[0]} {parent}{unused} {threads} 0 86400 0\n"
            )
            inner = "\t".join(["1"] * (depth - 1))
            (entry / "status").write_text(f"Name:\t{name}\nNSpid:\t{pid}\t{inner}\nNSsid:\t1\n")
            words = ["python3", "-m", "aenv_ray.engines.process.launcher", str(PLACE)]
            (entry / "cmdline").write_text("\0".join(words if pid == LAUNCHER else [name]))

    return make


def test_instances_and_what_they_started_are_counted_in_a_jail(table: Table) -> None:
    table(
        (LAUNCHER, 1, "S", "python3", 1),
        (TEMPLATE, LAUNCHER, "S", "python3", 1),
        (JAILER, TEMPLATE, "S", "python3", 2),
        (INNER, JAILER, "S", "python3", 3),
        (30, INNER, "S", "python3", 4),
        (31, 30, "S", "a) S 1 (b", 4),
        (32, INNER, "S", "aenv-spare", 4),
        (33, INNER, "Z", "python3", 4),
        (34, INNER, "Z2", "python3", 4),
        (40, 1, "S", "sleep", 1),
    )
    assert sorted(live_sandboxes.live_processes()) == [30, 31, 34]


def test_instances_are_counted_without_a_jail(table: Table) -> None:
    table(
        (LAUNCHER, 1, "S", "python3", 1),
        (TEMPLATE, LAUNCHER, "S", "python3", 1),
        (30, TEMPLATE, "S", "python3", 1),
        (31, 30, "R", "sh", 1),
        (32, TEMPLATE, "S", "aenv-spare", 1),
    )
    assert sorted(live_sandboxes.live_processes()) == [30, 31]
    assert sorted(live_sandboxes.live_processes(PLACE)) == [30, 31]
    assert live_sandboxes.live_processes(PLACE / "another") == []


def test_what_ends_while_it_is_counted_is_not_counted(table: Table, tmp_path: Path) -> None:
    table(
        (LAUNCHER, 1, "S", "python3", 1),
        (TEMPLATE, LAUNCHER, "S", "python3", 1),
        (30, TEMPLATE, "S", "python3", 1),
        (31, TEMPLATE, "S", "python3", 1),
    )
    (tmp_path / "30" / "status").unlink()
    (tmp_path / "50").mkdir()
    assert live_sandboxes.live_processes() == [31]


def test_without_a_launcher_nothing_is_counted(table: Table) -> None:
    table((30, 1, "S", "python3", 1))
    assert live_sandboxes.live_processes() == []
