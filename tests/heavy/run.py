"""Tests adapters with trainers that need torch, in a virtual environment that is built once.

    ./test integrations --heavy [PYTEST ARGUMENTS]

It is about 2 GB, so neither `./test` nor CI does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from tests.fixtures.package_environments import package_environment

ROOT: Final = Path(__file__).resolve().parents[2]
TRAINERS: Final = ("trl", "gymnasium", "stable-baselines3", "rllib", "gem")
"""Extras of ours."""
BESIDE: Final = ("torch==2.13.0", "pytest", "pytest-asyncio", "pytest-timeout")
LIMIT_S: Final = 1200


def main(arguments: list[str]) -> int:
    """Run the tests beside this file; return pytest's exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [r for r in project["dependencies"] if not r.startswith("pytest")]
    extras = [r for name in TRAINERS for r in project["optional-dependencies"][name]]
    environment, refusal = package_environment("trainers", (*ours, *extras, *BESIDE))
    if environment is None:
        sys.stderr.write(f"{refusal}\n")
        return 1
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-m", "pytest", "--rootdir", ".", "--confcutdir", ".",
         *arguments],
        cwd=Path(__file__).parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
