"""Tests adapters with frameworks too large for CI, in virtual environments that are built once.

    ./test integrations --heavy [SUITE] [PYTEST ARGUMENTS]

They are several GB, so neither `./test` nor CI does it. Frameworks that cannot be installed
together have one each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fixtures.package_environments import package_environment

ROOT: Final = Path(__file__).resolve().parents[2]
TOOLS: Final = ("pytest", "pytest-asyncio", "pytest-timeout")
LIMIT_S: Final = 1200


@dataclass(frozen=True)
class Suite:
    """Tests that run in one virtual environment."""

    name: str
    extras: tuple[str, ...]
    """Of ours."""
    beside: tuple[str, ...]
    """Further requirements."""
    tests: tuple[str, ...]
    """Arguments of pytest that select them."""
    overrides: tuple[str, ...] = ()
    """Requirements in place of those of the packages."""
    python: str = ""
    """Version of Python; "": the one that runs this."""


WITH_VERL: Final = ("test_verl.py", "test_batches.py")
WITH_OPENENV: Final = ("test_openenv.py", "test_openenv_containers.py")
WITH_NEMO_GYM: Final = ("test_nemo_gym.py",)
SUITES: Final = (
    Suite(
        "trainers",
        ("trl", "gymnasium", "stable-baselines3", "rllib", "gem"),
        ("torch==2.13.0", *TOOLS),
        tuple(f"--ignore={name}" for name in WITH_VERL + WITH_OPENENV + WITH_NEMO_GYM),
    ),
    # Its hydra needs another antlr than gem's math-verify; its torch is that of verl[cpu].
    Suite("verl", ("verl",), ("torch==2.11.0", *TOOLS), WITH_VERL),
    Suite("openenv", ("openenv",), TOOLS, WITH_OPENENV),
    Suite(
        "nemo-gym", ("nemo-gym",), ("nemo-gym>=0.4", *TOOLS), WITH_NEMO_GYM,
        # Its servers with MCP need version 1 of mcp; ours are plain ones.
        overrides=("mcp>=2",), python="3.12",
    ),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the tests beside this file; return pytest's worst exit code.

    Args:
        arguments: Of pytest. The first may name a suite, to run only that one.
    """
    names = [suite.name for suite in SUITES]
    chosen = SUITES
    if arguments and arguments[0] in names:
        chosen = (SUITES[names.index(arguments[0])],)
        arguments = arguments[1:]
    return max(run(suite, arguments) for suite in chosen)


def run(suite: Suite, arguments: list[str]) -> int:
    """Run a suite; return pytest's exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [r for r in project["dependencies"] if not r.startswith("pytest")]
    extras = [r for name in suite.extras for r in project["optional-dependencies"][name]]
    environment, refusal = package_environment(
        suite.name, (*ours, *extras, *suite.beside), overrides=suite.overrides, python=suite.python
    )
    if environment is None:
        sys.stderr.write(f"{refusal}\n")
        return 1
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-m", "pytest", "--rootdir", ".", "--confcutdir", ".",
         *suite.tests, *arguments],
        cwd=Path(__file__).parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
