"""Every example runs as its docstring says, on a Ray that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "handles.py": ["lines [1, 2, 3, 4]", "left 0"],
    "negotiation.py": ["agreed at 55: seller 0.3, buyer 0.7", "left 0"],
    "rollouts.py": ["reward mean 1.0 over 12, void 0"],
    "vector.py": ["lines ['0', '1', '2', '3', '4', '5', '6', '7']", "received 8", "left 0"],
}


def test_every_example_is_run() -> None:
    assert set(EXPECTED) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(name: str, cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in EXPECTED[name]:
        assert line in done.stdout
