"""Races between file operations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.runtime.door import workspace


def test_a_file_that_is_deleted_during_the_listing_is_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).touch()
    scan_really = os.scandir

    @contextlib.contextmanager
    def scan(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan_really(path) as entries:
            found = list(entries)
        (tmp_path / "two").unlink()
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scan)
    listed = workspace.list_files(str(tmp_path))["entries"]
    monkeypatch.undo()
    assert [entry["name"] for entry in listed] == ["one", "three"]
