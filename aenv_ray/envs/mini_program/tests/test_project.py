"""Every task's reference earns 1.0 where there is a browser, and an empty application 0.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mini_program
import pytest
from webapp import browser

PROJECT = Path(__file__).resolve().parent.parent
ROWS = [json.loads(line) for line in (PROJECT / "tasks.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_grading_outlasts_a_busy_node() -> None:
    """With the default of 60 s, solved tasks would end without a reward there."""
    assert {row["reward"]["timeout_s"] for row in ROWS} == {mini_program.GRADING_S}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_reference_earns_1_and_nothing_earns_0(row: dict[str, Any]) -> None:
    if row["setup"]["arguments"]["browser_required"] and browser.find() is None:
        pytest.skip("there is no Chromium")
    mini_program.start_app(**row["setup"]["arguments"])
    assert mini_program.app_works(**row["reward"]["arguments"])["score"] == 0.0
    for call in row["reference"]:
        mini_program.write_file(**call["arguments"])
    assert mini_program.validate()["valid"]
    graded = mini_program.app_works(**row["reward"]["arguments"])
    assert graded["score"] == 1.0, graded["reason"]
