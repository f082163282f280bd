"""What process 1 of a sandbox does beside answering calls: it reaps what others leave."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process 1 is a Linux thing")

_PROGRAM = """
import os, signal, socket, sys, threading
from aenv_ray.runtime.system.reaper import Acceptor

handled = threading.Event()
signal.signal(signal.SIGCHLD, lambda *_: handled.set())
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
acceptor = Acceptor(listener)

def another_thread():
    signal.pthread_kill(threading.get_ident(), signal.SIGCHLD)  # the kernel may choose any
    print(handled.wait(20), flush=True)
    os._exit(0)

threading.Thread(target=another_thread).start()
acceptor.accept()
"""


def test_a_signal_that_reaches_another_thread_is_handled_without_a_connection() -> None:
    """Else zombies stay until somebody connects."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
