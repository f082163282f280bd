"""A new terminal in a new directory for every test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import mini_terminal  # noqa: E402
from shell import Shell  # noqa: E402

Execute = Callable[..., dict[str, Any]]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new directory, as the runtime does for an instance."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def execute(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Execute]:
    """Return `execute_command` with a shell that ends with the test."""
    shell = Shell()
    monkeypatch.setattr(mini_terminal, "_shell", shell)
    monkeypatch.setattr(mini_terminal, "_started", {})
    yield mini_terminal.execute_command
    shell.close()
