"""A node of the process engine for tests: its own directories, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from aenv_ray.engines import census
from aenv_ray.engines.launcher_client import node_directory
from aenv_ray.engines.process import ProcessEngine
from aenv_ray.ids import HostId

SCOPE = "tests"


class Node:
    """One launcher's directory, and the engines on it.

    Args:
        isolation: As for `ProcessEngine`.
    """

    def __init__(self, isolation: str = "auto") -> None:
        # Short: a socket's path holds 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
        self.root.chmod(0o755)
        self.isolation = isolation
        self.directory = node_directory(self.root / "r", SCOPE)
        self.data_dir = self.root / "d"

    def engine(self, host_id: HostId) -> ProcessEngine:
        """Return an engine; its launcher ends with this process."""
        return ProcessEngine(
            host_id,
            runtime_dir=self.root / "r",
            data_dir=self.data_dir,
            scope=SCOPE,
            owner_pid=os.getpid(),
            isolation=self.isolation,
        )

    def sandbox_pids(self) -> list[int]:
        """Return the pids of all sandbox processes, from the process table."""
        return census.live_processes(self.directory)

    def kill_sandboxes(self) -> None:
        """SIGKILL every sandbox process."""
        for pid in self.sandbox_pids():
            with contextlib.suppress(ProcessLookupError):  # it went with its parent
                os.kill(pid, signal.SIGKILL)

    def left_over(self) -> list[str]:
        """Return what is left of sandboxes: processes, sockets, logs, work directories."""
        found = [f"process {pid}" for pid in self.sandbox_pids()]
        for name in ("s", "work"):
            found += [str(path) for path in (self.directory / name).glob("*")]
        logs = (self.directory / "log").glob("*")
        return found + [str(path) for path in logs if not path.name.startswith("template-")]

    def launcher_pids(self) -> list[int]:
        """Return the pids of this directory's launcher; none or one."""
        done = subprocess.run(
            ["pgrep", "-f", f"aenv_ray.engines.launcher {self.directory}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return [int(word) for word in done.stdout.split()]

    def mentions(self) -> list[str]:
        """Return the processes that name this node's directory."""
        done = subprocess.run(
            ["pgrep", "-a", "-f", str(self.root)], capture_output=True, text=True, check=False
        )
        return done.stdout.splitlines()

    def end(self) -> None:
        """End the launcher and delete everything.

        Raises:
            AssertionError: Something was left.
        """
        end = time.monotonic() + 60.0
        while (before := self.left_over()) and time.monotonic() < end:
            time.sleep(0.01)
        for pid in self.launcher_pids():
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 60.0
        while self.mentions() and time.monotonic() < end:
            time.sleep(0.01)
        after = self.mentions()
        shutil.rmtree(self.root)
        assert before == [], "sandboxes were left"
        assert after == [], "the launcher or a template was left"
