"""The verdict of a task, by what its tests reported."""

from __future__ import annotations

import json
import math
from typing import Any, Final

PASSED: Final = "passed"
FAILED: Final = "failed"

Outcome = dict[str, Any]
Session = list[dict[str, Any]]


def outcomes_of(session: Session) -> dict[str, str]:
    """Return the verdict of each test of a session of pytest.

    As in Terminal-Bench, a test that was skipped or failed as expected has passed, and one that
    passed unexpectedly has not.
    """
    found: dict[str, str] = {}
    for one in session:
        name, outcome = one.get("test"), one.get("outcome")
        if not isinstance(name, str):
            continue
        is_unexpected = one.get("expected") and one.get("when") == "call" and outcome == PASSED
        if outcome == FAILED or is_unexpected:
            found[name] = FAILED
        elif outcome in (PASSED, "skipped"):
            found.setdefault(name, PASSED)
    return found


def has_passed(session: Session) -> bool:
    """Return whether a session of pytest ended by itself, and all of its tests passed."""
    tests = outcomes_of(session)
    ends = [one["ended"] for one in session if "ended" in one]
    has_ended = ends == [0] and not hides_failures(session)
    return has_ended and bool(tests) and set(tests.values()) == {PASSED}


def hides_failures(session: Session) -> bool:
    """Return whether a session of pytest reported a test that fails as passed."""
    return any(one.get("hides_failures") for one in session)


def verdict(kind: str, outcome: Outcome) -> dict[str, Any]:
    """Return the score and what it is made of.

    Args:
        kind: ``pytest``: 1.0 if all tests passed, by the report of pytest. ``file``: the number in
            the reward file; a full reward must not contradict the report of pytest,
            and tests that write only certain numbers give no others.
        outcome: The result of `grader.grade`.
    """
    if "refused" in outcome:
        return {"score": 0.0, "reason": outcome["refused"], "tests": {}}
    sessions: list[Session] = outcome["sessions"]
    tests = {name: state for session in sessions for name, state in outcomes_of(session).items()}
    found = {
        "tests": tests,
        "exit_code": outcome["exit_code"],
        "output": outcome["output"],
        "set_aside": outcome["set_aside"],
    }
    if not outcome["in_time"]:
        return {"score": 0.0, "reason": "the tests did not end in time", **found}
    if outcome["replaced_tests"]:
        names = ", ".join(outcome["replaced_tests"][:5])
        return {"score": 0.0, "reason": f"pytest ran other tests than the task's: {names}", **found}
    all_passed = bool(sessions) and all(map(has_passed, sessions))
    if kind == "pytest":
        reason = "all tests passed" if all_passed else _why_not(sessions, tests)
        return {"score": float(all_passed), "reason": reason, **found}
    score, rewards, reason = reward_of(outcome["reward"])
    written = outcome["rewards_written"]
    why = ""
    if score >= 1.0 and (sessions or outcome["runs_pytest"]) and not all_passed:
        why = _why_not(sessions, tests)
    elif written is not None and score not in (0.0, *written):
        why = "the tests write no such number"
    if why:
        return {"score": 0.0, "reason": f"the reward file says {score:g}, but {why}", **found}
    return {"score": score, "reason": reason, "rewards": rewards, **found}


def _why_not(sessions: list[Session], tests: dict[str, str]) -> str:
    if not sessions:
        return "pytest did not run"
    if any(map(hides_failures, sessions)):
        return "pytest reports a test that fails as passed"
    failed = [name for name, state in tests.items() if state == FAILED]
    if failed:
        return f"{len(failed)} of {len(tests)} tests failed: {', '.join(failed[:5])}"
    return "pytest did not end by itself" if tests else "pytest found no tests"


def reward_of(files: dict[str, str]) -> tuple[float, dict[str, float], str]:
    """Return the score, all rewards by name, and the reason.

    ``reward.txt`` has one number. ``reward.json`` has one or several by name; the score is that of
    ``reward``, or the only one, else their mean.
    """
    if "reward.txt" in files:
        number = _number(files["reward.txt"].strip())
        if number is None:
            return 0.0, {}, f"reward.txt has no number: {files['reward.txt'][:80]!r}"
        return number, {"reward": number}, f"reward.txt says {number:g}"
    if "reward.json" not in files:
        return 0.0, {}, "the tests wrote no reward file"
    try:
        data = json.loads(files["reward.json"])
    except (ValueError, RecursionError):
        return 0.0, {}, "reward.json is not JSON"
    given = data if isinstance(data, dict) else {"reward": data}
    rewards = {str(name): _number(value) for name, value in given.items()}
    numbers = {name: value for name, value in rewards.items() if value is not None}
    if not numbers:
        return 0.0, {}, "reward.json has no number"
    score = numbers.get("reward", sum(numbers.values()) / len(numbers))
    return score, numbers, f"reward.json says {score:g}"


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
