"""The call that a spare makes before it is an instance, and its rehearsal in the template."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

FORKS = """
import gc, json, os, resource, sys, threading
from aenv_ray.runtime.door.host.link import HOST
from aenv_ray.runtime.fork.spare import FirstCall

first_call = FirstCall()
if sys.argv[1] == "rehearsed":
    first_call.rehearse()
threads = len(os.listdir("/proc/self/task"))
gc.collect()
gc.freeze()
if (pid := os.fork()) == 0:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first_call.run()
    copied = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    found = {"threads": threads, "copied": copied, "has_host": HOST.was_open}
    print(json.dumps(found), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def fork(how: str) -> dict[str, Any]:
    command = [sys.executable, "-c", FORKS, how]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def test_a_rehearsal_saves_forks_pages_and_leaves_no_thread() -> None:
    rehearsed = fork("rehearsed")
    assert rehearsed["threads"] == 1
    assert rehearsed["copied"] < 0.85 * fork("not")["copied"]


def test_code_that_is_imported_after_the_first_call_finds_no_host() -> None:
    """Otherwise a project that asks a model while it is imported would wait for an answer."""
    assert fork("rehearsed")["has_host"] is False
