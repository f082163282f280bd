"""The linters find nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTERS = (
    ("mypy",),
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports", "--no-cache"),
    ("vulture",),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", LINTERS, ids=" ".join)
def test_it_finds_nothing(command: tuple[str, ...]) -> None:
    program, *arguments = command
    # CI uses its clone once, and writing mypy's cache takes a tenth of the time.
    unkept = {"MYPY_CACHE_DIR": os.devnull} if "CI" in os.environ else {}
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments], cwd=ROOT, env=os.environ | unkept,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
