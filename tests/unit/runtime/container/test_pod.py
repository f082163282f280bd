"""The report of process 1 of a pod about an instance that does not start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process 1 of a pod is on Linux")
# In a process of its own, for it waits for every child that it has.
_KEEP = """
import json, os, socket, subprocess
from aenv_ray.runtime.container.pod import Supervisor, TerminationLog

with socket.create_server(("127.0.0.1", 0)) as listener:
    link, other = socket.socketpair()
    supervisor = Supervisor(listener, b"key", 60.0, TerminationLog(), link)
    supervisor._pid = subprocess.Popen(["sleep", "600"]).pid
    out, into = os.pipe()
    os.write(into, b"loading\\nstill looking\\n")
    os.close(into)
    supervisor._read_output(out)
    told = supervisor.await_boot(0.05)
    print(json.dumps(told))
"""


def test_an_instance_that_does_not_start_is_killed_and_its_log_reported() -> None:
    """Invariants 3 and 9."""
    done = subprocess.run(
        [sys.executable, "-c", _KEEP], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "failed": "it was not up after 0.05 s; the end of its log:\nloading\nstill looking"
    }
