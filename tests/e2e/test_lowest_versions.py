"""The lowest versions that pyproject.toml allows work: the ranges are what tests have shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
IN_CI = "fresh-clone" in os.environ.get("AENV_REQUIRE", "") or os.environ.get("CI") == "true"
NOT_NEEDED = (
    "ruff", "mypy", "import-linter", "vulture", "pytest>", "kubernetes>", "s3fs", "moto", "flask",
)  # fmt: skip
"""Of the development tools: linters, what has a lowest version of its own, and what no unit test
uses."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ray,
    pytest.mark.timeout(DEADLINE_S),
    pytest.mark.skipif(
        not IN_CI, reason="installs from the network; ask with AENV_REQUIRE=fresh-clone"
    ),
]


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, without the environment of these tests."""
    environment = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "AENV_REQUIRE"}}
    return subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a virtual environment with the lowest versions."""
    from uv import find_uv_bin

    venv = tmp_path_factory.mktemp("lowest") / "venv"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = [t for t in project["dependency-groups"]["dev"] if not t.startswith(NOT_NEEDED)]
    python = str(venv / "bin" / "python")
    install = [find_uv_bin(), "pip", "install", "--quiet", "--python", python]
    base = getattr(sys, "_base_executable", sys.executable)
    for command in (
        [find_uv_bin(), "venv", "--quiet", "--python", base, str(venv)],
        [*install, "--resolution", "lowest-direct", "--editable", ".[kubernetes]"],
        [*install, *tools],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    return venv / "bin"


def test_rollouts_run_on_the_lowest_versions(lowest: Path, tmp_path: Path) -> None:
    options = ("--rollouts", "8", "--concurrency", "4", "--json", "--out", str(tmp_path / "out"))
    with tempfile.TemporaryDirectory(prefix="aenv-low-", dir="/tmp") as short:  # for sockets
        done = run(
            str(lowest / "aenv"), "quickstart", *options,
            AENV_RUNTIME_DIR=f"{short}/r", AENV_DATA_DIR=f"{short}/d",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert (summary["succeeded"], summary["reward_mean"], summary["instances_left"]) == (8, 1.0, 0)


def test_unit_tests_pass_on_the_lowest_versions(lowest: Path) -> None:
    pytest_of_it = [str(lowest / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Code of environments uses nothing of ours but the runtime.
    done = run(
        *pytest_of_it,
        "tests/unit",
        "--ignore",
        "tests/unit/envs",
        AENV_TEST_RESOLUTION="lowest-direct",
    )
    assert done.returncode == 0, done.stdout[-4000:]
