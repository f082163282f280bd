"""The options of commands that sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from aenv_ray.cli.main import main
from aenv_ray.cli.sampling.options import ModelOptions


@pytest.mark.parametrize("given", ["0", "8-4", "0-4", "many"])
@pytest.mark.parametrize(
    "command",
    [
        ["sample", "code", "--policy", "null"],
        ["eval", "code", "--policy", "null"],
        ["replay", "run1.jsonl"],
        ["rescore", "run1.jsonl", "--out", "rescored.jsonl"],
        ["synthesize", "code", "--generator", "tasks.jsonl", "--out", "kept.jsonl"],
        ["quickstart"],
    ],
)
def test_a_concurrency_that_is_no_number_and_no_bounds_is_refused(
    command: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    assert main([*command, "--concurrency", given]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "concurrency must be a number of at least 1, or a lower and an upper bound" in said


def test_options_of_a_model_are_those_that_were_given_with_their_values_read(
    tmp_path: Path,
) -> None:
    assert ModelOptions().given == {}
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    found = ModelOptions(
        system=f"@{system}",
        prompt="{instruction}",
        price="0.5,1.5",
        stop_tool=["submit"],
        request='{"temperature": 0}',
        max_cost=0.0,
        stream=True,
    )
    assert found.given == {
        "system": "Be brief.",
        "prompt": "{instruction}",
        "prices": (0.5, 1.5),
        "stop_tools": ("submit",),
        "request": {"temperature": 0},
        "max_cost": 0.0,
        "stream": True,
    }
    assert ModelOptions(price="reported").given == {"prices": "reported"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("price", "cheap"), ("request", "[]"), ("request", "{"), ("system", "@/nowhere")],
)
def test_a_malformed_option_of_a_model_is_wrong_usage(option: str, value: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        ModelOptions(**{option: value})  # type: ignore[arg-type]  # each is a text
    assert caught.value.param_hint == f"--{option}"
