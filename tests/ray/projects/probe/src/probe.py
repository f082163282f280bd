"""Tools that say what they do, to a file in the sandbox and to a witness outside of it."""

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from aenv_ray.runtime import (
    PromptMessage,
    current_call,
    register_function,
    register_health,
    register_prompt,
    register_resource,
    register_reward,
    register_tool,
)

_lock = threading.Lock()
_state: dict[str, Any] = {"count": 0, "health": "healthy"}


def _tell(text: str) -> None:
    """Tell the witness, whose port the variable gives; it outlives this sandbox."""
    port = os.environ.get("PROBE_WITNESS")
    if port:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), ("127.0.0.1", int(port)))


@register_resource("probe://manual", mime_type="text/markdown")
def manual() -> str:
    """What the probe is for."""
    return "# Probe"


@register_resource("probe://numbers/{number}")
async def number_bytes(number: int) -> bytes:
    """The bytes of a number."""
    return number.to_bytes(2)


@register_prompt
def review(subject: str, tone: str = "calm") -> list[Any]:
    """Begin a review.

    Args:
        subject: What to review.
    """
    return [f"Review {subject}.", PromptMessage(f"In a {tone} tone.", role="assistant")]


@register_tool
def echo(text: str) -> str:
    """Return the text."""
    return text


@register_tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@register_tool
def count() -> int:
    """Count up: state of the process."""
    with _lock:
        _state["count"] += 1
        return int(_state["count"])


@register_tool
def note(line: str) -> int:
    """Append a line to notes.txt and tell the witness: each run leaves a trace."""
    with _lock, Path("notes.txt").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    _tell(f"note {line}")
    return os.getpid()


@register_tool
def hold(key: str) -> str:
    """Run until the file `key` appears."""
    _tell(f"began {key}")
    try:
        while not Path(key).exists():
            time.sleep(0.01)
    except BaseException:
        _tell(f"interrupted {key}")
        raise
    _tell(f"ended {key}")
    return f"held {key}"


@register_tool
async def ahold(key: str) -> str:
    """Run until the file `key` appears, on the loop."""
    import asyncio

    _tell(f"began {key}")
    try:
        while not os.path.exists(key):  # noqa: ASYNC110, ASYNC240  # a file tells nobody
            await asyncio.sleep(0.01)
    except BaseException:
        _tell(f"interrupted {key}")
        raise
    _tell(f"ended {key}")
    return f"held {key}"


@register_tool
def block() -> None:
    """Hang in one system call, which nothing interrupts."""
    threading.Event().wait(3600)


@register_tool
def fail(text: str) -> None:
    """Raise."""
    raise ValueError(text)


@register_tool
def leave(code: int) -> None:
    """End the whole process at once."""
    _tell(f"leaving {code}")
    os._exit(code)


@register_tool
def shout(megabytes: int) -> int:
    """Print a lot."""
    line = "x" * 1023 + "\n"
    for _ in range(megabytes * 1024):
        sys.stdout.write(line)
    return megabytes


@register_tool
def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@register_tool
def stages(total: int) -> str:
    """Report progress."""
    for stage in range(1, total + 1):
        current_call().progress(stage, total, f"stage {stage}")
    return "through"


@register_tool
def surroundings(names: list[str]) -> dict[str, Any]:
    """Return variables, arguments and directory of the process."""
    return {
        "variables": {name: os.environ.get(name) for name in names},
        "arguments": sys.argv[1:],
        "directory": os.getcwd(),
    }


@register_function
def double(value: int) -> int:
    """Double a number."""
    return 2 * value


@register_function
def set_health(status: str) -> str:
    """Set what the health check says."""
    _state["health"] = status
    return status


@register_function
def burst() -> None:
    """Raise."""
    raise RuntimeError("the function burst")


@register_reward
def score(value: float = 0.5) -> dict[str, float]:
    """Return the value."""
    return {"score": value}


@register_reward(name="not-a-number")
def not_a_number() -> float:
    """Return NaN."""
    return float("nan")


@register_reward(name="raising")
def raising() -> float:
    """Raise."""
    raise RuntimeError("the judge fell ill")


@register_reward(name="wordy")
def wordy() -> str:
    """Return no number."""
    return "good"


@register_reward(name="counted")
def counted(expected: int) -> float:
    """Return 1 if `count` ran `expected` times here."""
    return float(_state["count"] == expected)


@register_health
def health() -> dict[str, Any]:
    """Say how the environment is."""
    return {"status": _state["health"]}
