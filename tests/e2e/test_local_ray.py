"""A local Ray that a program gets without asking: how long it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_quickstart import environment_of, processes_of, root, wait_until

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


def test_a_ray_that_a_thread_started_outlives_the_thread(root: Path) -> None:
    """The kernel kills Ray's processes with the thread that made them; a sampling has its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment_of(root) | {"PYTHONPATH": os.getcwd()}, cwd=root, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\nalive\n{None}\n"), done.stderr
    wait_until(lambda: not processes_of(root), 60)
