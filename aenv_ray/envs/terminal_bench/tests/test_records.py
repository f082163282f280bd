"""The setup of tasks in earlier records, which are replayed and scored again."""

from __future__ import annotations

from typing import Any

import container
import pytest
import terminal_bench


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: str, **__: Any) -> dict[str, Any]:
        return {
            "fingerprints": {}, "package_settings": None, "image_variables": {}, "project": {},
        }  # fmt: skip

    monkeypatch.setattr(container, "run", run)
    monkeypatch.setattr(terminal_bench, "_task", None)


@pytest.mark.usefixtures("prepared")
def test_the_task_of_an_earlier_record_is_started() -> None:
    """These have a command, which was empty for almost all of them."""
    arguments: dict[str, Any] = {"command": [], "variables": {}, "directory": "/app"}
    assert terminal_bench.start_task(**arguments) == {"directory": "/app"}


@pytest.mark.usefixtures("prepared")
def test_a_command_is_an_error_and_is_not_ignored() -> None:
    with pytest.raises(RuntimeError, match=r"\['redis-server'\].* would not run"):
        terminal_bench.start_task(["redis-server"], {}, "/app")
