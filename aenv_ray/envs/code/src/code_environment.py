"""Programming tasks: an agent writes Python, and hidden tests decide.

The agent writes files, runs code, and submits a solution. The trainer calls `grade` with the tests.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import judging
import programs
from judging import JudgeEnded, Kind, Limits, Test
from pydantic import BaseModel, ConfigDict

from aenv_ray.runtime import (
    current_call,
    register_health,
    register_reset,
    register_reward,
    register_tool,
)

MOST_CODE_BYTES: Final = 100_000
"""Size limit of code that an agent runs or submits."""
MOST_S: Final = 600.0
"""How long all tests may take; the caller's timeout may be shorter."""
_LISTED: Final = 200
"""Maximum number of verdicts in the result of a reward."""


class TaskFields(BaseModel):
    """What an agent may know of a task. The hidden tests are arguments of the reward."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    preamble: str = ""
    public_tests: tuple[Test, ...] = ()
    limits: Limits = Limits()


@dataclass
class Episode:
    """The state of an episode."""

    task: TaskFields
    submission: str | None = None


_episode = Episode(TaskFields())


@register_reset
def begin(task: Any) -> None:
    """Begin an episode; the task's ``public_tests`` are what `run_public_tests` runs."""
    global _episode
    _episode = Episode(TaskFields.model_validate(task or {}))


@register_tool
def run_code(code: str, stdin: str = "", timeout: float = 10) -> dict[str, Any]:
    """Run Python code in the work directory, with the standard library only.

    Args:
        code: A Python program, at most 100,000 bytes.
        stdin: Its standard input.
        timeout: Seconds, above 0; then the program is killed.

    Returns:
        ``exit_code`` (negative: the signal that ended it), ``stdout``, ``stderr``, ``timed_out``,
        and ``truncated`` if an output was longer than 64 KiB.
    """
    _check_size(code)
    remaining_s = min(current_call().remaining_s, MOST_S) - 1.0
    return programs.run(code, stdin, max(0.1, min(timeout, remaining_s)))


@register_tool
def write_file(path: str, text: str) -> dict[str, int]:
    """Write a text file; directories are created.

    Args:
        path: Relative to the work directory.
        text: The content.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return {"characters": target.write_text(text, encoding="utf-8")}


@register_tool
def submit_solution(code: str = "", path: str = "") -> dict[str, Any]:
    """Submit the solution: its code, or the path of its file. The last submission counts.

    Args:
        code: Python code. It may define the function that the task asks for, or be only its body.
        path: A file in the work directory, instead of `code`.
    """
    if bool(code) == bool(path):
        raise ValueError("give either code or path")
    source = programs.read(path, MOST_CODE_BYTES) if path else code
    _check_size(source)
    _episode.submission = source
    return {"submitted": True, "bytes": len(source.encode())}


@register_tool(timeout=120)
def run_public_tests() -> dict[str, Any]:
    """Run the public tests of the task against the last submission."""
    tests = _episode.task.public_tests
    if not tests:
        return {"passed": 0, "total": 0, "note": "this task has no public tests"}
    return _graded(list(tests), _episode.task.preamble, _episode.task.limits)


@register_reward(timeout=MOST_S)
def grade(tests: list[Test], preamble: str = "", limits: Limits = Limits()) -> dict[str, Any]:  # noqa: B008  # frozen
    """Run the hidden tests against the last submission.

    Args:
        tests: The tests.
        preamble: Code that the solution begins with.
        limits: The limits of each test.

    Returns:
        ``score`` 1.0 if all tests pass, else 0.0; ``passed``, ``total``, and ``tests``: the
        verdicts, at most 200, those that did not pass first.

    Raises:
        ValueError: There are no tests.
        RuntimeError: The judge could not start.
    """
    if not tests:
        raise ValueError("the task has no tests, so nothing could be graded")
    return _graded(tests, preamble, limits)


@register_health
def health() -> dict[str, str]:
    """Return whether the judge can run here."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as exc:
        return {"status": "unhealthy", "reason": f"the judge needs Linux with pidfd_open: {exc}"}
    if not sys.executable:
        return {"status": "unhealthy", "reason": "the path of the Python interpreter is not known"}
    return {"status": "healthy"}


def _check_size(code: str) -> None:
    size = len(code.encode("utf-8", "surrogatepass"))
    if size > MOST_CODE_BYTES:
        raise ValueError(f"the code has {size} bytes; the limit is {MOST_CODE_BYTES}")


def _graded(tests: list[Test], preamble: str, limits: Limits) -> dict[str, Any]:
    if _episode.submission is None:
        return _outcome(0, len(tests), "nothing was submitted")
    # A whole program brings its own beginning.
    is_program = all(test.kind is Kind.PROGRAM for test in tests)
    given = _episode.submission
    source = f"{preamble}\n{given}" if is_program else judging.with_preamble(preamble, given)
    try:
        available_s = min(current_call().remaining_s, MOST_S)
        verdicts = judging.judge(source, tests, limits, available_s)
    except JudgeEnded as exc:
        return _outcome(0, len(tests), str(exc))
    passed = sum(one.verdict == "passed" for one in verdicts)
    numbered = sorted(enumerate(verdicts), key=lambda item: item[1].verdict == "passed")
    listed = [{"test": n, **one.model_dump(exclude_none=True)} for n, one in numbered[:_LISTED]]
    left_out = {"tests_left_out": len(verdicts) - _LISTED} if len(verdicts) > _LISTED else {}
    return _outcome(passed, len(tests), None) | {"tests": listed} | left_out


def _outcome(passed: int, total: int, reason: str | None) -> dict[str, Any]:
    score = float(passed == total)
    found: dict[str, Any] = {"score": score, "passed": passed, "total": total}
    return found if reason is None else found | {"reason": reason}
