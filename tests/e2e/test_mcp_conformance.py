"""The official conformance suite of MCP, against the public door."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import require
from tests.e2e.serving import serving
from tests.fixtures.mcp_conformance import conformance_command, failures

pytestmark = pytest.mark.e2e
PROJECT = Path(__file__).parents[1] / "fixtures" / "projects" / "mcp-features"
SCENARIOS = 32


@pytest.mark.timeout(600)
def test_all_scenarios_pass_at_the_public_door(tmp_path: Path) -> None:
    command, refusal = conformance_command()
    require("mcp-conformance", command is not None, refusal)
    with serving(PROJECT, tmp_path) as server:
        failed, count = failures(f"{server.url}/mcp", tmp_path / "results")
    assert failed == {}
    assert count == SCENARIOS
