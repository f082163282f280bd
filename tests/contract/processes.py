"""The process table, read here: a program that reads it costs as much as all that it would find."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

from aenv_ray.testing.contract_bench import pause_s


def naming(text: str) -> dict[int, str]:
    """Return the processes whose command line contains `text`: their pids and what it is."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
            if text in (words := line.decode(errors="replace")):
                found[int(entry.name)] = words
    return found


def signal_all(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those of the processes that have not ended since somebody found them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def children(parents: Container[int]) -> list[int]:
    """Return the pids of all whose parent is one of `parents`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) in parents:
                found.append(int(entry.name))
    return found


def none_after_a_while(found: Callable[[], list[Any]], within_s: float = 60.0) -> list[Any]:
    """Return what is still found after `within_s`; nothing as soon as nothing is."""
    begun = time.monotonic()
    while True:
        looked = time.monotonic()
        left = found()
        now = time.monotonic()
        if not left or now - begun > within_s:
            return left
        time.sleep(pause_s(now - begun, now - looked))
