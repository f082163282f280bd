"""A template's forks leave out what Python does for other threads, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates fork on Linux")

_PROGRAM = """
import logging, os, random, threading
from aenv_ray.runtime.fork.forks import Forks

told = []
os.register_at_fork(
    before=lambda: told.append("before"),
    after_in_child=lambda: told.append("child"),
    after_in_parent=lambda: told.append("parent"),
)
forks = Forks()
lock, numbers = threading._active_limbo_lock, random.getstate()

def is_mended():
    return threading._active_limbo_lock is not lock

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

if (pid := forks.fork_alone()) == 0:
    print(told, "reseeded" if random.getstate() != numbers else "twins", is_mended(), flush=True)
    if (inner := os.fork()) == 0:  # a tool that forks, with the runtime's threads around
        print(is_mended(), flush=True)
        os._exit(0)
    logging.getLogger().warning("no lock is held")
    os._exit(wait(inner))
print(wait(pid), told, is_mended(), flush=True)
if (pid := os.fork()) == 0:
    print(is_mended(), flush=True)
    os._exit(0)
wait(pid)
"""


def test_a_fork_alone_runs_all_hooks_but_those_for_other_threads() -> None:
    """Environments' own hooks and `random`'s stay: two instances must not draw the same numbers."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "no lock is held\n"
    assert done.stdout.splitlines() == [
        "['before', 'child'] reseeded False",
        "True",
        "0 ['before', 'parent'] False",
        "True",
    ]
