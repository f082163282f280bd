"""What the grader knows about the processes of the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grader

_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
_WITHOUT_MAIN_THREAD = (
    "import ctypes, threading\n"
    "threading.Thread(target=input).start()\n"
    f"ctypes.CDLL(None).syscall({_EXIT}, 0)\n"
)


def test_a_process_whose_main_thread_has_ended_is_left() -> None:
    """The kernel reports its state as that of a process that has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_MAIN_THREAD], stdin=subprocess.PIPE
    ) as child:
        try:
            while ") Z" not in Path(f"/proc/{child.pid}/stat").read_text():
                assert child.poll() is None
            assert child.pid in grader._others()
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert child.pid not in grader._others()
        finally:
            child.kill()
