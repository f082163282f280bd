"""The documents' code on a real Ray: what a reader pastes does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.quickstarts import environment_of, root
from tests.ray.faults import eventually_empty, processes_of

__all__ = ["root"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```python ray\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^```text output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "=== end of block"

pytestmark = [pytest.mark.e2e, pytest.mark.ray]


def test_every_ray_block_runs_and_the_first_prints_what_the_readme_shows(root):
    blocks = [b for page in PAGES for b in FENCE.findall(page.read_text(encoding="utf-8"))]
    # One driver for all of them: a Ray of its own for each would take minutes.
    run = "exec({block!r}, {{'__name__': 'block'}})\nprint({mark!r})\n"
    script = "".join(run.format(block=block, mark=MARK) for block in blocks)
    script += "import aenv_ray\nassert aenv_ray.list_instances() == []\n"
    (root / "blocks.py").write_text(script, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "blocks.py"], cwd=root, env=environment_of(root), capture_output=True,
        text=True, timeout=110, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    printed = ran.stdout.split(f"{MARK}\n")
    assert len(printed) == len(blocks) + 1
    (shown,) = OUTPUT.findall(PAGES[0].read_text(encoding="utf-8"))
    assert printed[0] == shown
    eventually_empty(lambda: processes_of(root))  # its Ray ends with it
