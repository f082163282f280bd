"""Failures are printed as they happen, and a dead server costs few timeouts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from tests.verdicts import Verdicts
def pytest_configure(config):
    config.pluginmanager.register(Verdicts(config))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a function that runs a directory of tests with more arguments."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def test_a_run_that_is_killed_has_told_what_failed(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import threading\n"
        "def test_a():\n    assert 1 == 2, 'for this reason'\n"
        "def test_b():\n    threading.Event().wait(100)\n"
    )
    process = subprocess.Popen(
        [*command, "-n", "1"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        told = next(line for line in process.stdout if "failed" in line)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    place = tmp_path / "test_x.py"
    assert told.startswith(f"test_x.py::test_a failed (call): {place}:3: AssertionError: for this")


def test_a_module_in_which_all_time_out_is_given_up(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import threading, pytest\n"
        "@pytest.mark.parametrize('n', range(20))\n"
        "def test_hangs(n):\n    threading.Event().wait(100)\n"
    )
    done = subprocess.run(
        [*command, "--timeout", "1"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if " failed (" in line]
    given_up = [line for line in told if "not tried: 3 tests of test_x.py timed out" in line]
    assert (len(told), len(given_up)) == (20, 17)


def test_a_process_in_which_all_time_out_gives_up(command: list[str], tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(
            "import threading, pytest\n"
            "@pytest.mark.parametrize('n', range(2))\n"
            "def test_hangs(n):\n    threading.Event().wait(100)\n"
        )
    done = subprocess.run(
        [*command, "--timeout", "1"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if " failed (" in line]
    given_up = [line for line in told if "not tried: 6 tests timed out before" in line]
    assert (len(told), len(given_up)) == (8, 2)


def test_a_test_that_no_timeout_ends_ends_its_process(command: list[str], tmp_path: Path) -> None:
    watched = CONFTEST.replace("Verdicts(config)", "Verdicts(config, 1.0)")
    (tmp_path / "conftest.py").write_text(watched)
    (tmp_path / "test_x.py").write_text(
        "import time\n"
        "def test_hangs():\n"
        "    while True:\n"
        "        try:\n            time.sleep(100)\n"
        "        except BaseException:\n            pass\n"
    )
    done = subprocess.run(
        [*command, "--timeout", "1"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in test_hangs" in done.stderr


def test_a_run_ends_after_a_worker_has_crashed(command: list[str], tmp_path: Path) -> None:
    """The test that crashed it fails and is not tried again; the one after it still runs."""
    scheduling = (
        "from tests.groups import GroupScheduling\n"
        "def pytest_xdist_make_scheduler(config, log):\n    return GroupScheduling(config, log)\n"
    )
    (tmp_path / "conftest.py").write_text(CONFTEST + scheduling)
    (tmp_path / "test_a.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "test_b.py").write_text("def test_c(): pass\n")
    (tmp_path / "test_x.py").write_text(
        "import os\n"
        "def test_first(): pass\n"
        "def test_crashes():\n    os._exit(1)\n"
        "def test_last(): pass\n"
    )
    done = subprocess.run(
        [*command, "-n", "2", "--dist", "loadscope"],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 5 passed" in done.stdout


def test_why_a_run_broke_off_is_said_last(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        CONFTEST + "def pytest_runtest_makereport():\n    raise SystemError('the reason')\n"
    )
    (tmp_path / "test_x.py").write_text("def test_a(): pass\n")
    done = subprocess.run(
        [*command, "-n", "1"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    _, _, reason = done.stderr.rpartition("the run was aborted")
    assert "SystemError: the reason" in reason
