"""The user of a task's image."""

from __future__ import annotations

import os
from typing import Any

import container
import grader
import pytest
import terminal_bench


def test_a_task_without_root_is_an_error_and_not_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent could not be graded, whatever it does."""

    def run(*_: str, request: dict[str, Any], **__: Any) -> dict[str, Any]:
        return grader.prepare(request)

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(container, "run", run)
    with pytest.raises(RuntimeError, match=r"user id 1000.* USER root"):
        terminal_bench.start_task(directory="/app")
