"""The process engine needs no root: its contract, run as somebody who is nobody here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.namespaces

SOMEBODY = 61_234
TESTS = (
    "test_a_started_sandbox or test_one_that_fails or ends_whatever or sandboxs_own or outlives "
    "or the_deadline_ends or full_directory or a_timeout_kills or variables or stop_during "
    "or fork_bomb or every_privilege or read_only or children or grandchild"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="this user is ordinary: every test here shows it")
def test_the_contract_holds_for_an_ordinary_user() -> None:
    """Design D3: no root."""
    home = Path(f"/tmp/ae-user-{os.getpid()}")
    home.mkdir(mode=0o700)
    os.chown(home, SOMEBODY, SOMEBODY)
    repository = Path(__file__).parents[2]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1", "AENV_REQUIRE": os.environ.get("AENV_REQUIRE", ""),
    }  # fmt: skip
    try:
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                "--basetemp", str(home / "t"), "-k", f"({TESTS}) and not Fake and not Without",
                "tests/contract/test_engines.py", "tests/contract/test_isolation.py",
            ],
            cwd=repository, env=environment, capture_output=True, text=True, check=False,
            user=SOMEBODY, group=SOMEBODY, extra_groups=[], timeout=110,
        )  # fmt: skip
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
