"""Importing is cheap: each entry point loads only what it must (style rule 8)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"ray", "redis", "docker", "fastmcp", "mcp", "starlette", "httpx", "uvicorn"}
PROBE = """
import json, sys
{statement}
print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))
"""


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules of a fresh interpreter after `statement`."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import aenv_ray", HEAVY | {"pydantic", "typer"}),
        ("import aenv_ray.cli.main", HEAVY | {"pydantic", "rich"}),
        (
            "from aenv_ray.cli.main import main; main(['version', '-s'])",
            HEAVY | {"rich"},
        ),
        ("from aenv_ray.cli.main import main; main(['--help'])", HEAVY | {"pydantic", "rich"}),
        ("import aenv_ray.project.project", HEAVY | {"typer", "rich"}),
        ("import aenv_ray.runtime", HEAVY | {"typer", "rich"}),
        ("import aenv_ray.runtime.api.loader", HEAVY | {"typer", "rich"}),
        # Before anything is installed; see scripts/bootstrap.py.
        ("import aenv_ray.engines.node.installer", HEAVY | {"pydantic", "typer", "rich"}),
        ("import aenv_ray.serve.gateway.app", {"mcp", "mcp_types", "fastmcp"}),
    ],
)
def test_a_fresh_interpreter_loads_none_of_the_heavy_packages(statement, forbidden):
    assert loaded_by(statement) & forbidden == set()
