"""Adapters of agent frameworks work with the real frameworks, installed beside our requirements."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import require
from tests.fixtures.package_environments import package_environment

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "fixtures"
BESIDE = ("pytest", "pytest-asyncio", "pytest-timeout")
PYTEST = ("-m", "pytest", "-q", "--rootdir", ".", "--confcutdir", ".")


@pytest.mark.timeout(600)
@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("tests", "extras", "beside", "overrides"),
    [
        (
            "agent_frameworks",
            (
                "openai-agents",
                "langchain",
                "pydantic-ai",
                "smolagents",
                "google-adk",
                "autogen",
                "a2a",
            ),
            ("anthropic", "langgraph", *BESIDE),
            (),
        ),
        ("rollout_frameworks", ("inspect", "gymnasium", "skyrl-gym"), BESIDE, ()),
        # Its requirements exclude the newest mcp and openai.
        ("verifiers_framework", ("verifiers",), BESIDE, ()),
        ("camel_framework", ("camel",), BESIDE, ("mcp<2",)),
    ],
)
def test_adapters_work_with_real_frameworks(
    tests: str, extras: tuple[str, ...], beside: tuple[str, ...], overrides: tuple[str, ...]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [r for r in project["dependencies"] if not r.startswith("pytest")]
    theirs = [r for name in extras for r in project["optional-dependencies"][name]]
    environment, refusal = package_environment(
        tests, (*ours, *theirs, *beside), overrides=overrides
    )
    require("frameworks", environment is not None, refusal)
    assert environment is not None
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    variables["AENV_TEST_PYTHON"] = sys.executable
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        [str(environment / "bin" / "python"), *PYTEST],
        cwd=TESTS / tests, env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
