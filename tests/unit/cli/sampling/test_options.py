"""The options of commands that sample."""

from __future__ import annotations

import pytest

from aenv_ray.cli.main import main


@pytest.mark.parametrize("given", ["0", "8-4", "0-4", "many"])
@pytest.mark.parametrize("command", [["sample", "code"], ["eval", "code"]])
def test_a_concurrency_that_is_no_number_and_no_bounds_is_refused(
    command: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    assert main([*command, "--policy", "null", "--concurrency", given]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "concurrency must be a number of at least 1, or a lower and an upper bound" in said
