"""The tools that the engine contract calls: each does one thing that an engine must survive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from aenv_ray.runtime import (
    Image,
    current_call,
    register_function,
    register_health,
    register_reset,
    register_reward,
    register_tasks,
    register_tool,
)

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d4944415478da63fccf50cf0000048001020fb4d1c40000000049454e44ae426082"
)
_counts: dict[str, int] = {}
_lock = threading.Lock()
_barriers: dict[str, threading.Barrier] = {}
_listeners: list[socket.socket] = []
_health: dict[str, Any] = {"status": "healthy"}
basket: list[str] = []
_episode: dict[str, Any] = {}


class Point(BaseModel):
    """A nested argument and result."""

    x: float
    y: float = 0.0


def _nap(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


@register_tool
def echo(text: str, times: int = 1) -> str:
    """Return the text, some times over."""
    return text * times


@register_tool
async def aecho(text: str) -> str:
    """Return the text from an event loop."""
    await asyncio.sleep(0)
    return text


@register_tool
def count(key: str, seconds: float = 0.0) -> int:
    """Count the calls with this key, slowly if asked: the witness of how often a tool ran."""
    with _lock:
        _counts[key] = _counts.get(key, 0) + 1
        result = _counts[key]
    _nap(seconds)
    return result


@register_tool
def broken(text: str = "it broke") -> None:
    """Raise."""
    raise ValueError(text)


@register_tool
def leave(code: int = 3) -> str:
    """End the runtime's process without a word."""
    os._exit(code)


@register_tool
def quit_politely() -> None:
    """Raise `SystemExit`, as ``sys.exit()`` in a tool does."""
    sys.exit(4)


@register_tool
def value(kind: str) -> Any:
    """Return a value of a kind that is hard to send."""
    cycle: list[Any] = []
    cycle.append(cycle)
    values: dict[str, Any] = {
        "nan": {"nan": float("nan"), "inf": float("inf")},
        "bytes": b"\x00\x01\xff",
        "image": Image(PIXEL),
        "mixed": ["a pixel:", Image(PIXEL)],
        "cycle": cycle,
        "lock": _lock,
        "model": Point(x=1.5),
        "none": None,
        "surrogate": "half \ud83d a pair",
        "object": {"a": [1, 2.5, None, "ü"]},
    }
    return values[kind]


@register_tool
def huge_list(length: int) -> list[int]:
    """Return a long list."""
    return list(range(length))


@register_tool
def nap(seconds: float) -> float:
    """Sleep in short steps."""
    _nap(seconds)
    return seconds


def _touch(path: str) -> None:
    Path(path).touch()


@register_tool
def until_stopped(marker: str, seconds: float = 60.0) -> None:
    """Leave ``<marker>.began``, and ``<marker>.stopped`` when interrupted."""
    Path(f"{marker}.began").touch()
    try:
        _nap(seconds)
    except BaseException:
        Path(f"{marker}.stopped").touch()
        raise


@register_tool
async def auntil_stopped(marker: str, seconds: float = 60.0) -> None:
    """Leave the same marks from an event loop."""
    _touch(f"{marker}.began")
    try:
        await asyncio.sleep(seconds)
    except BaseException:
        _touch(f"{marker}.stopped")
        raise


@register_tool
def run(command: list[str]) -> int:
    """Run a program to its end, as most tools do."""
    return subprocess.run(command, check=False).returncode


@register_tool
def spawn(command: list[str], daemon: bool = False) -> int:
    """Start a program and leave it running; as a daemon it leaves our session and parentage."""
    if not daemon:
        output = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
        return os.posix_spawnp(command[0], command, os.environ, file_actions=[output])
    script = 'setsid "$@" >/dev/null 2>&1 </dev/null & echo $!'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@register_tool
def running(argument: str) -> int:
    """Count the live processes that have this argument, as far as they can be seen from here."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found += argument.encode() in words[1:]
    return found


@register_tool
def meet(key: str, parties: int) -> int:
    """Return when as many calls as `parties` run at the same time."""
    with _lock:
        barrier = _barriers.setdefault(key, threading.Barrier(parties))
    barrier.wait(100.0)
    return parties


@register_tool
def steps(total: int) -> int:
    """Report progress."""
    for step in range(1, total + 1):
        current_call().progress(step, total, f"step {step}")
    return total


@register_tool
def fork_and_return() -> str:
    """Fork, and return from here in both processes."""
    return "parent" if os.fork() else "child"


@register_tool
def leak_thread() -> None:
    """Leave a thread behind that never ends."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@register_tool
def fill(limit_bytes: int) -> int:
    """Write to the work directory until there is no space, or `limit_bytes` are written."""
    piece = bytes(1 << 20)
    with Path("filler").open("wb") as file:
        for _ in range(limit_bytes >> 20):
            file.write(piece)
    return limit_bytes


@register_tool
def listen() -> int:
    """Listen on loopback and return the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    _listeners.append(listener)
    return int(listener.getsockname()[1])


@register_tool
def connect(port: int) -> bool:
    """Whether something answers on that port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    except OSError:
        return False
    return True


@register_tool
def facts() -> dict[str, Any]:
    """Return what the instance was given."""
    return {"environ": dict(os.environ), "arguments": sys.argv[1:], "cwd": str(Path.cwd())}


@register_tool
def import_late() -> str:
    """Import a module of the project now."""
    from parts.late import GREETING  # type: ignore[import-not-found]  # on the instance's path

    return str(GREETING)


@register_tool
def move(point: Point, by: list[float] | None = None) -> Point:
    """Take and return a model."""
    dx, dy = by or [1.0, 1.0]
    return Point(x=point.x + dx, y=point.y + dy)


@register_tool
def evaluate(source: str) -> Any:
    """Run Python source in the runtime's process and return its ``result``."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names.get("result")


@register_tool
def put(item: str) -> list[str]:
    """Put an item into the basket, which a reset empties."""
    basket.append(item)
    return basket


@register_tool
def episode() -> dict[str, Any]:
    """Return what the last reset was given, and the seed of the episode."""
    return {**_episode, "current_seed": current_call().seed}


@register_reward
def score(answer: str = "") -> dict[str, float]:
    """Score an answer."""
    return {"score": float(answer == "42")}


@register_reward
def bad_score() -> float:
    """Return no number."""
    return float("nan")


@register_function
def reset(seed: int = 0) -> dict[str, int]:
    """Start over."""
    return {"seed": seed}


@register_function
def broken_function() -> None:
    """Raise."""
    raise RuntimeError("it broke as well")


@register_function
def set_health(status: str) -> None:
    """Set what the health check says."""
    _health["status"] = status


@register_reset(state=["basket"])
def start_over(task: Any = None, seed: int | None = None) -> None:
    """Empty the basket, unless the task is to forget that, or to fail."""
    _episode.update(task=task, seed=seed)
    if task == "raise":
        raise RuntimeError("the reset broke")
    if task != "forget":
        basket.clear()


@register_tasks
def tasks() -> Iterator[dict[str, Any]]:
    """Yield five tasks."""
    for number in range(5):
        yield {"id": f"task-{number}", "instruction": f"do {number}"}


@register_health
def health() -> dict[str, Any]:
    """Return the status."""
    return _health
