"""Texts that no process can be given are refused where they are written, by their field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.errors import ConfigError
from aenv_ray.project.process_strings import MAX_TEXT_BYTES, MAX_TOTAL_BYTES
from aenv_ray.project.project import read_config

MANY = {f"N{n}": "x" * 100_000 for n in range(6)}
BAD_VARIABLES: list[tuple[dict[str, str], str]] = [
    ({"A": "\ud800"}, r"\['A'\] has a lone surrogate"),
    ({"A\ud800": "x"}, "a key .* lone surrogate"),
    ({"": "x"}, r"\[''\]: invalid variable name"),
    ({"A=B": "x"}, r"\['A=B'\]: invalid variable name"),
    ({"A\0": "x"}, "a key .* NUL"),
    ({"A": "hush\0"}, r"\['A'\] has a NUL"),
    ({"A": "x" * (MAX_TEXT_BYTES + 1)}, rf"\['A'\] is .* {MAX_TEXT_BYTES:,}"),
    ({"A": "x" * (MAX_TEXT_BYTES - 1)}, rf"\['A'\] with its name is .* {MAX_TEXT_BYTES:,}"),
    (MANY, f"in total, more than the limit of {MAX_TOTAL_BYTES:,}"),
]


@pytest.mark.parametrize(("variables", "says"), BAD_VARIABLES, ids=range(len(BAD_VARIABLES)))
def test_variables_that_cannot_be(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        CreateOptions(environment_variables=variables)
    assert "environment_variables" in caught.value.message
    assert "hush" not in str(caught.value), "invariant 10"


@pytest.mark.parametrize("field", ["environmentVariables", "env"])
@pytest.mark.parametrize(("variables", "says"), BAD_VARIABLES, ids=range(len(BAD_VARIABLES)))
def test_a_projects_variables_that_cannot_be(
    tmp_path: Path, field: str, variables: dict[str, str], says: str
) -> None:
    """As in `create`, and the message names file and field."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "x", "deployConfig": {field: variables}}))
    with pytest.raises(
        ConfigError, match=rf"(?s)config\.json: .*deployConfig\.{field}.*"
    ) as caught:
        read_config(path)
    assert caught.match(says)
    assert "hush" not in str(caught.value), "invariant 10"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arguments": ["\udfff"]}, r"arguments\[0\] has a lone surrogate"),
        ({"arguments": ["x" * 131_072]}, r"arguments\[0\] is 131,072 bytes"),
        ({"arguments": ["x" * 100_000] * 6}, "arguments are 600,000 bytes in total"),
        ({"labels": {"l": "\ud800"}}, r"labels\['l'\] has a lone surrogate"),
        ({"labels": {"\ud800": "l"}}, "a key of labels has a lone surrogate"),
        ({"owner": "\ud800"}, "owner has a lone surrogate"),
        ({"datasource": "\ud800"}, "datasource has a lone surrogate"),
    ],
    ids=range(7),
)
def test_other_texts_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CreateOptions(**options)


def test_whatever_a_process_can_be_given_passes(tmp_path: Path) -> None:
    variables = {"A": "x" * (MAX_TEXT_BYTES - 2), "ü": "😀\n=", "B": ""}
    options = CreateOptions(environment_variables=variables, arguments=["", "=", "\n", "😀"])
    assert options.environment_variables == variables
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "x", "deployConfig": {"environmentVariables": variables}}))
    assert read_config(path).deploy.variables == variables
