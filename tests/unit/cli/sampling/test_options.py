"""The options of commands that sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from aenv_ray.cli.main import main
from aenv_ray.cli.sampling.options import model_options


@pytest.mark.parametrize("given", ["0", "8-4", "0-4", "many"])
@pytest.mark.parametrize("command", [["sample", "code"], ["eval", "code"]])
def test_a_concurrency_that_is_no_number_and_no_bounds_is_refused(
    command: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    assert main([*command, "--policy", "null", "--concurrency", given]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "concurrency must be a number of at least 1, or a lower and an upper bound" in said


ABSENT = {"system": None, "prompt": None, "price": None, "stop_tool": None, "request": None}


def test_options_of_a_model_are_those_that_were_given_with_their_values_read(
    tmp_path: Path,
) -> None:
    assert model_options(**ABSENT, base_url=None, stream=False) == {}
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    found = model_options(
        system=f"@{system}",
        prompt="{instruction}",
        price="0.5,1.5",
        stop_tool=["submit"],
        request='{"temperature": 0}',
        max_cost=0.0,
        stream=True,
    )
    assert found == {
        "system": "Be brief.",
        "prompt": "{instruction}",
        "prices": (0.5, 1.5),
        "stop_tools": ("submit",),
        "request": {"temperature": 0},
        "max_cost": 0.0,
        "stream": True,
    }
    assert model_options(**ABSENT | {"price": "reported"}) == {"prices": "reported"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("price", "cheap"), ("request", "[]"), ("request", "{"), ("system", "@/nowhere")],
)
def test_a_malformed_option_of_a_model_is_wrong_usage(option: str, value: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        model_options(**ABSENT | {option: value})
    assert caught.value.param_hint == f"--{option}"
