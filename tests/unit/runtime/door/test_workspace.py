"""Races between file operations, and the streams of commands."""

from __future__ import annotations

import base64
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


@pytest.mark.timeout(30)
def test_a_command_that_has_closed_its_outputs_gets_all_of_its_input(tmp_path: Path) -> None:
    """It would wait for the rest, and the call for its end."""
    given = base64.b64encode(b"x" * 300_000).decode()
    command = f"exec >/dev/null 2>&1; cat > {tmp_path}/copy"
    assert workspace.exec_command(command, stdin=given)["exit_code"] == 0
    assert (tmp_path / "copy").stat().st_size == 300_000
