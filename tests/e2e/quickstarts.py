"""A quickstart with its own directories, and Ctrl-C at a moment that the test chooses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.processes import signal_all
from tests.ray.faults import eventually, processes_of

QUICKSTART: Final = (sys.executable, "-m", "aenv_ray.cli.main", "quickstart")
_BEGIN_S: Final = 180.0


@pytest.fixture
def root() -> Iterator[Path]:
    """Directories of a Ray and a fabric of this test's own, on short paths."""
    path = Path(tempfile.mkdtemp(prefix="aenv-q", dir="/tmp"))
    yield path
    signal_all(processes_of(path))
    shutil.rmtree(path, ignore_errors=True)


def environment_of(root: Path) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "AENV_"))}
    return {
        **kept,
        "RAY_TMPDIR": str(root),
        "AENV_RUNTIME_DIR": str(root / "r"),
        "AENV_DATA_DIR": str(root / "d"),
    }


def quickstart(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QUICKSTART, *arguments],
        env=environment_of(root) | variables, cwd=root, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


class Running:
    """A quickstart that will be interrupted; it runs in its own session."""

    def __init__(self, root: Path, *options: str, **variables: str) -> None:
        self._process = subprocess.Popen(
            [*QUICKSTART, *options], env=environment_of(root) | variables, cwd=root, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.session = self._process.pid

    def interrupt(self, begun: Callable[[], Any], *, group: bool = False) -> str:
        """Send SIGINT once it has begun what the test waits for; return what it says on stderr.

        Args:
            begun: Whether it has.
            group: To its children as well, as a terminal does.
        """
        process = self._process
        try:
            eventually(lambda: begun() or process.poll() is not None, _BEGIN_S)
            if group:
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        assert (process.returncode, stdout) == (130, ""), stderr
        assert "Traceback" not in stderr
        return stderr


def interrupted(root: Path, *options: str, **variables: str) -> None:
    """Send SIGINT to a quickstart in the middle of its rollouts."""
    out = root / "episodes.jsonl"
    options = ("--rollouts", "100000", "--concurrency", "8", "--out", str(out), *options)
    running = Running(root, *options, **variables)
    running.interrupt(lambda: out.exists() and out.read_text().count("\n") >= 20)
