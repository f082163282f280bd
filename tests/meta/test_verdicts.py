"""Failures are printed as they happen, and a dead server costs few timeouts."""

from __future__ import annotations

import os
import shutil
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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
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


def runner(root: Path, monkeypatch: pytest.MonkeyPatch, **tests: str) -> list[str]:
    """Lay out a checkout with the runner and these modules; return the command that runs them."""
    copied = (
        "scripts/run_tests.py",
        "scripts/supervise.py",
        "tests/verdicts.py",
        "tests/groups.py",
    )
    for name in copied:
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    for name, text in tests.items():
        module = root / "tests" / name / f"test_{name}.py"
        module.parent.mkdir()
        module.write_text(text)
    for name in ("CI", "AENV_TEST_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    return [sys.executable, str(root / "scripts" / "run_tests.py"), "--workers", "2"]


def ran(command: list[str]) -> tuple[int, list[str]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout.splitlines()


def test_a_test_that_crashes_its_process_fails_and_those_after_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = runner(
        tmp_path,
        monkeypatch,
        a="def test_a(): pass\ndef test_b(): pass\n",
        b="import os\n"
        "def test_first(): pass\n"
        "def test_crashes():\n    os._exit(1)\n"
        "def test_next(): pass\n"
        "def test_crashes_too():\n    os.abort()\n"
        "def test_last(): pass\n",
    )
    code, lines = ran(command)
    assert (code, lines[-1]) == (1, "5 passed, 2 failed")
    assert any("b/test_b.py::test_crashes failed: its process ended" in line for line in lines)


def test_failures_are_tried_once_more_in_ci_and_both_results_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = runner(
        tmp_path,
        monkeypatch,
        a="import pathlib\n"
        "def test_second_try():\n"
        "    mark = pathlib.Path(__file__).with_name('mark')\n"
        "    first = not mark.exists()\n"
        "    mark.touch()\n"
        "    assert not first, 'for this reason'\n",
    )
    monkeypatch.setenv("CI", "true")
    code, lines = ran(command)
    assert (code, lines[-1]) == (0, "1 passed, 0 failed")
    assert any("failed (call)" in line and "for this reason" in line for line in lines)
    (tmp_path / "tests" / "a" / "mark").unlink()
    monkeypatch.delenv("CI")
    assert ran(command)[0] == 1
    monkeypatch.chdir(tmp_path)
    assert "1 passed" in ran([sys.executable, "-m", "pytest", "--last-failed", "-q"])[1][-1]


def test_a_job_that_leaves_a_process_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = runner(
        tmp_path,
        monkeypatch,
        a="import subprocess\n"
        "def test_leaves():\n"
        "    subprocess.Popen(['sleep', '987'], start_new_session=True)\n",
    )
    monkeypatch.setenv("AENV_TEST_GRACE", "0.5")
    code, lines = ran(command)
    assert code == 1
    assert lines[-1] == "1 passed, 0 failed"
    assert any("sleep 987" in line for line in lines)


def test_broken_modules_and_empty_runs_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = runner(
        tmp_path, monkeypatch, a="import nothing_of_this_name\n", b="def test(): pass\n"
    )
    code, lines = ran(command)
    assert (code, lines[-1]) == (1, "1 passed, 0 failed")
    assert any("nothing_of_this_name" in line for line in lines)
    (tmp_path / "tests" / "empty").mkdir()
    code, lines = ran([*command, str(tmp_path / "tests" / "empty")])
    assert (code, lines[-1]) == (1, "0 passed, 0 failed")


def test_skips_are_listed_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import pytest\n@pytest.mark.skip(reason='needs a lake')\ndef test(): pass\n"
    code, lines = ran(runner(tmp_path, monkeypatch, a=text))
    assert (code, lines[-2:]) == (
        0,
        ["1 skipped: Skipped: needs a lake", "0 passed, 0 failed, 1 skipped"],
    )
