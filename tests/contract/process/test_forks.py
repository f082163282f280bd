"""A template's forks skip the fork hooks that are for threads, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates fork on Linux")

_PROGRAM = """
import logging, os, random, threading
from aenv_ray.runtime.fork.template import Forker

ran = []
os.register_at_fork(
    before=lambda: ran.append("before"),
    after_in_child=lambda: ran.append("child"),
    after_in_parent=lambda: ran.append("parent"),
)
forker = Forker()
lock, numbers = threading._active_limbo_lock, random.getstate()

def is_repaired():
    return threading._active_limbo_lock is not lock

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

if (pid := forker.fork()) == 0:
    print(ran, "reseeded" if random.getstate() != numbers else "twins", is_repaired(), flush=True)
    if (inner := os.fork()) == 0:  # a tool that forks, with the runtime's threads around
        print(is_repaired(), flush=True)
        os._exit(0)
    logging.getLogger().warning("no lock is held")
    os._exit(wait(inner))
print(wait(pid), ran, is_repaired(), flush=True)
if (pid := os.fork()) == 0:
    print(is_repaired(), flush=True)
    os._exit(0)
wait(pid)
"""


def test_a_templates_fork_runs_all_hooks_but_those_for_threads() -> None:
    """Hooks of environments and of `random` run: two instances must not draw the same numbers."""
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
