"""Signals to process 1 of a sandbox: none that is sent from inside has an effect."""

from __future__ import annotations

import signal
from typing import Final

_KEPT: Final = frozenset(
    {"SIGCHLD", "SIGPIPE", "SIGKILL", "SIGSTOP"}
    # The kernel raises these for faults; libraries, such as a JVM, use them.
    | {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGABRT", "SIGSYS"}
)


def ignore_signals_from_inside() -> None:
    """Remove signal handlers, so that the kernel protects this process 1 of a pid namespace.

    From inside the namespace the kernel delivers to process 1 only signals that it handles. Python
    handles SIGINT, and a project's code may have set further handlers. From outside, SIGKILL still
    ends the process.

    Call it in the main thread, after the project's code was loaded.
    """
    for number in signal.valid_signals():
        name = signal.Signals(number).name if number in _NAMED else ""
        if name not in _KEPT and signal.getsignal(number) not in _UNHANDLED:
            signal.signal(number, signal.SIG_DFL)


_NAMED: Final = frozenset(signal.Signals)
_UNHANDLED: Final = (signal.SIG_DFL, signal.SIG_IGN)
