"""The examples of trainers run as their docstrings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.heavy.conftest import CORRIDOR

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations" / "trainers"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("gem_environment.py", (), "reward 1.0"),
        ("train_stable_baselines3.py", ("256",), "steps 256"),
        ("train_rllib.py", ("1",), "episodes "),
    ],
)
def test_it_runs(name: str, arguments: tuple[str, ...], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(CORRIDOR), *arguments],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert expected in done.stdout
