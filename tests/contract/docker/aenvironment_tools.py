"""An environment written for AEnvironment, which its own image serves on port 8081."""

import asyncio
import os
import time
from pathlib import Path

from aenv import register_function, register_reward, register_tool

_counts: dict[str, int] = {}


@register_tool
def echo(text: str, times: int = 1) -> str:
    """Return the text, some times over."""
    return text * times


@register_tool
async def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    await asyncio.sleep(0)
    return {"sum": a + b}


@register_tool
def count(key: str) -> int:
    """Say how often this ran."""
    _counts[key] = _counts.get(key, 0) + 1
    return _counts[key]


@register_tool
def fail(text: str) -> str:
    """Raise."""
    raise ValueError(text)


@register_tool
async def slow(seconds: float, path: str) -> str:
    """Take long, and leave a file at the end."""
    await asyncio.sleep(seconds)
    Path(path).touch()
    return "done"


@register_tool
def block(seconds: float) -> str:
    """Block the event loop for a long time."""
    time.sleep(seconds)
    return "done"


@register_tool
def die() -> None:
    """End the server in the middle of a call."""
    os._exit(7)


@register_function
def greet(name: str) -> dict[str, str]:
    return {"greeting": f"hello {name}"}


@register_function
def refuse() -> None:
    raise RuntimeError("not today")


@register_reward
def grade(answer: str) -> float:
    return float(answer == "42")
