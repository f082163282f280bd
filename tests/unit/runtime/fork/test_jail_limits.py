"""The limit of processes, which is set only where the kernel counts per sandbox."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aenv_ray.runtime.fork import jail_spec
from aenv_ray.runtime.fork.jail_spec import MAX_PROCESSES, JailSpec, facts, limits_processes

SOMEBODY = 61_235
CROWDED = f"""
import os, sys, threading
from aenv_ray.runtime.fork.jail import lock
from aenv_ray.runtime.fork.jail_spec import JailSpec

if os.geteuid() == 0:
    os.setgroups([]), os.setgid({SOMEBODY}), os.setuid({SOMEBODY})
threading.stack_size(65536)
for _ in range({MAX_PROCESSES + 10}):
    threading.Thread(target=sys.stdin.read, daemon=True).start()
lock(JailSpec(""), jailed=False)
if (pid := os.fork()) == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("forked", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux counts them")
def test_a_sandbox_without_namespaces_can_fork_however_many_threads_its_user_has() -> None:
    """Pods share a uid, and the kernel counts the threads of all of them together."""
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == ("forked\n", "")


@pytest.mark.parametrize(
    ("release", "jailed", "limited"),
    [
        ("5.14.0-427.el9.x86_64", True, True),
        ("6.8.0", True, True),
        ("5.13.19", True, False),
        ("4.4.0", True, False),
        ("6.8.0", False, False),
        ("unknown", True, False),
    ],
)
def test_facts_say_whether_processes_are_limited(
    monkeypatch: pytest.MonkeyPatch, release: str, jailed: bool, limited: bool
) -> None:
    uname = os.uname()
    monkeypatch.setattr(
        jail_spec.os, "uname", lambda: os.uname_result((*uname[:2], release, *uname[3:]))
    )
    limits_processes.cache_clear()
    found = facts(JailSpec(""), jailed=jailed, reason="a test")
    limits_processes.cache_clear()
    assert ("processes" in found.limits) == limited
    assert any("processes" in text for text in found.missing) != limited
