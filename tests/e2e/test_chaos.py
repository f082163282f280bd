"""``python -m aenv_ray.testing.chaos``: a short run, from the command to the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]


def test_no_death_leaves_anything_behind_runs_anything_twice_or_hides_its_cause(
    tmp_path: Path,
) -> None:
    """Invariants 1, 2 and 3, with a host, the controller and the driver as victims."""
    path = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "aenv_ray.testing.chaos", "--rounds", "3", "--seed", "4"]
    done = subprocess.run(
        [*command, "--engine", "process", "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert {k: figures[k] for k in ("rounds", "leaked", "run_twice", "untyped_failures")} == {
        "rounds": 3, "leaked": 0, "run_twice": 0, "untyped_failures": 0,
    }  # fmt: skip
    assert figures["victims"] == ["host", "controller", "driver"]
