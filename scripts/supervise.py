"""Run a command and find every process that it leaves behind.

    python -I scripts/supervise.py --deadline SECONDS [--grace SECONDS] -- COMMAND [ARGUMENT]...

Linux only. As a subreaper this process inherits orphans and daemons of the command, so it finds
what is left by descent and not by name. Processes that still live `--grace` seconds after the
command ended are printed and killed, and the exit code is 1. At the deadline, on SIGTERM and when
the parent dies, everything is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_TIMED_OUT = 124


def main() -> int:
    """Run the command; return its exit code, 1 if it left processes, or 124 at the deadline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _run(options.command, options.deadline, options.grace)
    except KeyboardInterrupt:
        return 130
    finally:
        end_all()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run(command: list[str], deadline_s: float, grace_s: float) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    by = time.monotonic() + deadline_s
    while process.returncode is None:
        if time.monotonic() > by:
            _show(f"not finished after {deadline_s:g} s", descendants())
            return _TIMED_OUT
        time.sleep(_POLL_S)
        _reap(process)
    code = process.returncode
    by = time.monotonic() + grace_s
    while (left := descendants()) and time.monotonic() < by:
        time.sleep(_POLL_S)
    if left:
        _show(f"{len(left)} processes left {grace_s:g} s after the end", left)
        return 1
    return code if code >= 0 else 128 - code


def _reap(command: subprocess.Popen[bytes] | None = None) -> None:
    """Reap ended processes, as an init does, and record the end of the command."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if command is not None and pid == command.pid:
                command.returncode = os.waitstatus_to_exitcode(status)


def descendants() -> list[int]:
    """Return the live processes below this one; reap those that ended."""
    _reap()
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The fields after the name, which may contain anything: state, parent.
                text = Path("/proc", name, "stat").read_text(errors="replace")
                state, parent = text.rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _show(problem: str, pids: list[int]) -> None:
    sys.stderr.write(f"error: {problem}:\n")
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            sys.stderr.write(f"  {pid} {words.decode(errors='replace')[:200]}\n")


def end_all() -> None:
    """Kill everything below this process, including what starts meanwhile."""
    while left := descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
