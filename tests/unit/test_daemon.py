"""Daemons leave everything of their starter behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, sys
from pathlib import Path
from aenv_ray.daemon import detach
kept = os.dup(1)
closed = os.dup(1)
result = Path(sys.argv[1]).resolve()
detach(keep=[kept])
def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
facts = {
    "leads": os.getpid() == os.getsid(0), "session": os.getsid(0), "directory": os.getcwd(),
    "kept": is_open(kept), "closed": is_open(closed), "umask": os.umask(0),
    "output": os.readlink("/proc/self/fd/1"),
}
os.write(kept, json.dumps(facts).encode())
"""


def test_a_daemon_keeps_only_what_it_is_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "result")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    facts = json.loads(done.stdout)  # complete once the daemon has closed the pipe
    assert facts.pop("session") != os.getsid(0)
    assert facts == {
        "leads": False,
        "directory": "/",
        "kept": True,
        "closed": False,
        "umask": 0o077,
        "output": os.devnull,
    }
