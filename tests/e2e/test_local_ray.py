"""A local Ray that a program gets without asking: how long it lives."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.quickstarts import Running, environment_of, root
from tests.ray.faults import eventually_empty, processes_of

__all__ = ["root"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import threading
import ray
import aenv_ray

made = []
thread = threading.Thread(target=lambda: made.append(aenv_ray.create("mini-terminal")))
thread.start()
thread.join()
for _ in range(2):
    result = ray.get(made[0].call_tool.remote("execute_command", {"command": "echo alive"}))
    print(result.data["output"][0], end="")
processes = ray._private.worker._global_node.all_processes
print({kind[0].process.poll() for kind in processes.values()})
"""


@pytest.mark.parametrize("begun", ["raylet/raylet", "ray::DashboardAgent"])
def test_ctrl_c_while_it_starts_leaves_nothing(root: Path, begun: str) -> None:
    """Invariant 3: its agents would look for the head of a Ray that is gone, for a minute."""
    running = Running(root)

    def is_begun() -> bool:
        return any(begun in command for command in session_of(running.session))

    running.interrupt(is_begun)
    eventually_empty(lambda: session_of(running.session), 50.0)


def session_of(session: int) -> list[str]:
    """Return the commands of a session's live processes; Ray's agents overwrite all else."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == session:
                command = Path("/proc", name, "cmdline").read_bytes()
                found += [command.replace(b"\0", b" ").decode(errors="replace")] if command else []
    return found


def test_a_ray_that_a_thread_started_outlives_the_thread(root: Path) -> None:
    """The kernel kills Ray's processes with the thread that made them; a sampling has its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment_of(root) | {"PYTHONPATH": os.getcwd()}, cwd=root, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\nalive\n{None}\n"), done.stderr
    eventually_empty(lambda: processes_of(root))
