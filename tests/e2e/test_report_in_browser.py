"""The report in a real browser: it is drawn, and texts of sandboxes stay texts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from aenv_ray.trajectories.report import report
from tests.conftest import require
from tests.unit.trajectories.episodes import episode, step

SCRIPT = "document.title='owned'"
ATTACK = f'</pre><img src=x onerror="{SCRIPT}"><script>{SCRIPT}</script>'


@pytest.mark.browser
def test_a_browser_draws_the_report_and_runs_nothing_of_it(tmp_path: Path) -> None:
    """The texts of tools, tasks and policies come from sandboxes and models."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    require("browser", browser is not None, "no Chromium on PATH")
    hostile = episode(0, 0.0, task_id=ATTACK, steps=(step(ATTACK),), output=ATTACK, error=ATTACK)
    page = tmp_path / "report.html"
    page.write_text(report([hostile, episode(1)], "run1.jsonl"), encoding="utf-8")
    ran = subprocess.run(
        [str(browser), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    drawn = ran.stdout
    assert "<title>run1.jsonl</title>" in drawn
    assert drawn.count("<svg") == 5
    assert drawn.count("<details>") == 2
    assert drawn.count("&lt;/pre&gt;&lt;img src=x") >= 5
    assert "<img" not in drawn
    assert "<script" not in drawn
