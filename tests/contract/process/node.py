"""A node of the process engine for tests: its own directories, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

from aenv_ray.engines import live_sandboxes
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.ids import HostId
from tests.contract.processes import naming, none_after_a_while, signal_all

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
        return live_sandboxes.live_processes(self.directory)

    def kill_sandboxes(self) -> None:
        """SIGKILL every sandbox process."""
        signal_all(self.sandbox_pids())

    def left_over(self) -> list[str]:
        """Return what is left of sandboxes: processes, sockets, logs, work directories."""
        found = [f"process {pid}" for pid in self.sandbox_pids()]
        for name in ("s", "work"):
            found += [str(path) for path in (self.directory / name).glob("*")]
        logs = (self.directory / "log").glob("*")
        return found + [str(path) for path in logs if not path.name.startswith("template-")]

    def launcher_pids(self) -> list[int]:
        """Return the pids of this directory's launcher; none or one."""
        return list(naming(f"aenv_ray.engines.process.launcher {self.directory}"))

    def mentions(self) -> list[str]:
        """Return the processes that name this node's directory."""
        return [f"{pid} {words}" for pid, words in naming(str(self.root)).items()]

    def end(self) -> None:
        """End the launcher and delete everything.

        Raises:
            AssertionError: Something was left.
        """
        before = none_after_a_while(self.left_over)
        signal_all(self.launcher_pids(), signal.SIGTERM)
        after = none_after_a_while(self.mentions)
        shutil.rmtree(self.root)
        assert before == [], "sandboxes were left"
        assert after == [], "the launcher or a template was left"
