"""Adapters of agent frameworks work with the real frameworks, installed beside our requirements."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.fixtures.framework_suites import LIGHT, Suite


@pytest.mark.timeout(1200)
@pytest.mark.namespaces
@pytest.mark.parametrize("suite", [pytest.param(suite, id=suite.name) for suite in LIGHT])
def test_adapters_work_with_real_frameworks(suite: Suite, tmp_path: Path) -> None:
    environment, refusal = suite.environment()
    require("frameworks", environment is not None, refusal)
    assert environment is not None
    done = subprocess.run(
        suite.command(environment), cwd=suite.directory, env=suite.variables(environment, tmp_path),
        capture_output=True, text=True, check=False, timeout=1150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
