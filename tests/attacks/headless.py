"""A process whose main thread has ended while another thread continues.

The kernel then reports the state of a process that has ended, and no memory, files or command line.
"""

from __future__ import annotations

import shlex
from typing import Final

_PROGRAM: Final = """
import ctypes, os, socket, threading, time
held = socket.socket(socket.AF_UNIX)
held.bind("\\0held")
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
START: Final = (
    f"python3 -c {shlex.quote(_PROGRAM)} >/dev/null 2>&1 </dev/null &"
    " until grep -q ') Z' /proc/$!/stat; do :; done"
)
"""Starts one, with a shell; it has the socket that `IS_OVER` looks for."""
IS_OVER: Final = """
import socket
with socket.socket(socket.AF_UNIX) as probe:
    try: probe.bind("\\0held")
    except OSError: result = False
    else: result = True
"""
"""Source that sets ``result`` to whether no such process runs."""
