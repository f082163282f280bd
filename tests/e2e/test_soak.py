"""``python -m benchmarks soak``: a short run, from the command to the curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import WARM_UP

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]
ROUNDS = WARM_UP + 2


def test_a_soak_prints_and_writes_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks", "soak", "--rounds", str(ROUNDS)]
    done = subprocess.run(
        [*command, "--cycles", str(20 * ROUNDS), "--calls", str(100 * ROUNDS), "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert f"round {ROUNDS:>2}/{ROUNDS}" in done.stdout, done.stdout + done.stderr
    curves = json.loads(path.read_text())
    assert {"memory of the driver", "descriptors", "processes", "keys"} <= set(curves)
    assert all(len(values) == ROUNDS and min(values) > 0 for values in curves.values()), curves
