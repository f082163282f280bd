"""Counting sandboxes from a process table alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_ray.engines import census
from aenv_ray.engines.census import _Process

LAUNCHER, TEMPLATE, INNER = 10, 20, 21


def table(monkeypatch: pytest.MonkeyPatch, *rows: tuple[int, int, str, str, int]) -> None:
    processes = {
        pid: _Process(pid=pid, parent=parent, state=state, name=name, pid_namespaces=depth)
        for pid, parent, state, name, depth in rows
    }
    monkeypatch.setattr(census, "_processes", lambda: processes)
    monkeypatch.setattr(census, "_is_launcher", lambda pid, _: pid == LAUNCHER)


def test_instances_and_what_they_started_are_counted_in_a_jail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table(
        monkeypatch,
        (LAUNCHER, 1, "S", "python3", 1),
        (TEMPLATE, LAUNCHER, "S", "python3", 1),
        (INNER, TEMPLATE, "S", "python3", 2),
        (30, INNER, "S", "python3", 3),
        (31, 30, "S", "sleep", 3),
        (32, INNER, "S", "aenv-spare", 3),
        (33, INNER, "Z", "python3", 3),
        (40, 1, "S", "sleep", 1),
    )
    assert sorted(census.live_processes()) == [30, 31]


def test_instances_are_counted_without_a_jail(monkeypatch: pytest.MonkeyPatch) -> None:
    table(
        monkeypatch,
        (LAUNCHER, 1, "S", "python3", 1),
        (TEMPLATE, LAUNCHER, "S", "python3", 1),
        (30, TEMPLATE, "S", "python3", 1),
        (31, 30, "R", "sh", 1),
        (32, TEMPLATE, "S", "aenv-spare", 1),
    )
    assert sorted(census.live_processes()) == [30, 31]


def test_without_a_launcher_nothing_is_counted(tmp_path: Path) -> None:
    assert census.live_processes(tmp_path) == []
    assert census._is_launcher(os.getpid(), None) is False
    assert census._is_launcher(2**22 + 1, None) is False
