"""Tools that leave a trace of each run, and tools that ruin their sandbox."""

import os
import threading
import time
from pathlib import Path

from aenv_ray.runtime import register_tool

TRACES = Path("traces.txt")
_BLOCK = 4 << 20
_lock = threading.Lock()


@register_tool
def trace(key: str, seconds: float) -> int:
    """Note that this call ran, take some time, and return how often it ran in this sandbox."""
    with _lock, TRACES.open("a", encoding="utf-8") as file:
        file.write(f"{key}\n")
    time.sleep(seconds)
    with _lock:
        return TRACES.read_text(encoding="utf-8").split().count(key)


@register_tool
def fill_disk(limit_bytes: int) -> int:
    """Write until the disk is full, but at most `limit_bytes`."""
    with Path("filling").open("wb") as file:
        while file.tell() < limit_bytes:
            file.write(os.urandom(_BLOCK))
        return file.tell()


@register_tool
def eat_memory(limit_bytes: int) -> int:
    """Use memory until there is no more, but at most `limit_bytes`."""
    eaten: list[bytes] = []
    while len(eaten) * _BLOCK < limit_bytes:
        eaten.append(b"x" * _BLOCK)
    return len(eaten) * _BLOCK
