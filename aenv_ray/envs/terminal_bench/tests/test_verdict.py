"""Scores, by what tests report and write."""

from __future__ import annotations

import base64
import io
import tarfile
from typing import Any

import grader
import pytest
from terminal import encoded
from verdict import has_passed, outcomes_of, reward_of, verdict


def phase(test: str, outcome: str, when: str = "call", *, expected: bool = False) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "when": when, "expected": expected}


PASSING = [{"began": 1}, phase("a", "passed", "setup"), phase("a", "passed"), {"ended": 0}]
FAILING = [{"began": 1}, phase("a", "passed"), phase("b", "failed"), {"ended": 1}]


def archive_of(files: dict[str, str]) -> str:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return base64.b64encode(content.getvalue()).decode()


def outcome(**fields: Any) -> dict[str, Any]:
    base = {"exit_code": 0, "in_time": True, "output": "", "sessions": [], "reward": {}}
    base |= {"set_aside": [], "runs_pytest": False, "rewards_written": None, "replaced_tests": []}
    return {**base, **fields}


def test_each_test_has_the_verdict_that_terminal_bench_gives_it() -> None:
    session = [
        phase("skipped", "skipped", "setup"),
        phase("xfail", "skipped", expected=True),
        phase("xpass", "passed", expected=True),
        phase("late", "passed"),
        phase("late", "failed", "teardown"),
    ]
    assert outcomes_of(session) == {
        "skipped": "passed", "xfail": "passed", "xpass": "failed", "late": "failed",
    }  # fmt: skip


@pytest.mark.parametrize(
    "session",
    [
        [],
        [{"began": 1}, {"ended": 5}],
        PASSING[:-1],  # pytest was killed
        [*PASSING[:-1], {"ended": 2}],
        [*PASSING[:-1], {"hides_failures": True}, {"ended": 0}],
        [*PASSING, {"ended": 0}],
        [PASSING[0], phase("a", "passed")],
        FAILING,
    ],
)
def test_a_session_that_did_not_end_well_has_not_passed(session: list[dict[str, Any]]) -> None:
    assert not has_passed(session)


def test_every_session_must_pass() -> None:
    """A second report cannot make good for the one of the tests."""
    assert verdict("pytest", outcome(sessions=[PASSING]))["score"] == 1.0
    found = verdict("pytest", outcome(sessions=[PASSING, FAILING]))
    assert (found["score"], found["tests"]) == (0.0, {"a": "passed", "b": "failed"})
    assert verdict("pytest", outcome(output="PASSED a\n1 passed"))["score"] == 0.0


def test_a_full_reward_must_not_contradict_pytest() -> None:
    full = {"reward": {"reward.txt": "1\n"}}
    assert verdict("file", outcome(**full))["score"] == 1.0
    assert verdict("file", outcome(**full, sessions=[PASSING]))["score"] == 1.0
    found = verdict("file", outcome(**full, sessions=[FAILING]))
    assert (found["score"], "1 of 2 tests failed" in found["reason"]) == (0.0, True)
    found = verdict("file", outcome(**full, runs_pytest=True))
    assert (found["score"], "pytest did not run" in found["reason"]) == (0.0, True)


def test_tests_that_write_only_certain_numbers_give_no_others() -> None:
    most = {"reward": {"reward.txt": "0.99"}}
    assert verdict("file", outcome(**most, sessions=[FAILING]))["score"] == 0.99
    found = verdict("file", outcome(**most, sessions=[FAILING], rewards_written=[1.0, 0.0]))
    assert (found["score"], "no such number" in found["reason"]) == (0.0, True)


@pytest.mark.parametrize(
    ("script", "runs", "rewards"),
    [
        (
            "pytest /tests -rA\nif [ $? = 0 ]; then echo 1 > /logs/verifier/reward.txt; fi",
            True,
            [1.0],
        ),
        (
            "uvx \\\n  -w pytest==8 \\\n  pytest /tests\necho 0 >/logs/verifier/reward.txt",
            True,
            [0.0],
        ),
        ("# pytest\npip install pytest\nsudo -u me pytest\npython score.py", False, None),
        ("echo $share > /logs/verifier/reward.txt", False, None),
        ("echo 1 >/logs/verifier/reward.txt; cp /tmp/reward.json /logs/verifier", False, None),
    ],
)
def test_what_a_script_runs_and_writes_is_told_by_its_text(
    script: str, runs: bool, rewards: list[float] | None
) -> None:
    assert (grader.runs_pytest([script]), grader.rewards_written([script])) == (runs, rewards)


DEFAULT = "echo 0 > /logs/verifier/reward.txt\nnode /tests/grade.mjs\n"


@pytest.mark.parametrize(
    ("other", "rewards"),
    [
        ({"grade.mjs": "fs.writeFileSync('/logs/verifier/reward.txt', '1')"}, None),
        ({"grade": "\x7fELF\0/logs/verifier/reward.json\0"}, None),
        ({"expected.json": '{"sum": 4}'}, [0.0]),
        ({}, [0.0]),
    ],
)
def test_no_number_is_ruled_out_if_another_program_may_write_it(
    other: dict[str, str], rewards: list[float] | None
) -> None:
    files = {"test.sh": DEFAULT, **other}
    assert grader.rewards_written_by(archive_of(files)) == rewards


def test_tests_that_were_replaced_earn_nothing() -> None:
    found = verdict("pytest", outcome(sessions=[PASSING], replaced_tests=["/tests/test_a.py"]))
    assert (found["score"], "/tests/test_a.py" in found["reason"]) == (0.0, True)


def test_tests_that_were_refused_or_ended_late_earn_nothing() -> None:
    assert verdict("file", {"refused": "why"}) == {"score": 0.0, "reason": "why", "tests": {}}
    late = outcome(reward={"reward.txt": "1"}, in_time=False, exit_code=None)
    assert verdict("file", late)["score"] == 0.0


@pytest.mark.parametrize(
    ("files", "score"),
    [
        ({"reward.txt": " 0.5\n"}, 0.5),
        ({"reward.txt": "0.25", "reward.json": '{"reward": 1}'}, 0.25),
        ({"reward.json": '{"reward": 0.5, "style": 1}'}, 0.5),
        ({"reward.json": '{"a": 0, "b": 1}'}, 0.5),
        ({"reward.json": "1"}, 1.0),
        ({"reward.txt": "nan"}, 0.0),
        ({"reward.txt": "yes"}, 0.0),
        ({"reward.json": "{"}, 0.0),
        ({"reward.json": '{"a": null}'}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_reward_file_has_the_score(files: dict[str, str], score: float) -> None:
    assert reward_of(files)[0] == score


@pytest.mark.parametrize(
    ("key", "sent"),
    [("Enter", b"\r"), ("C-c", b"\x03"), ("C-[", b"\x1b"), ("M-x", b"\x1bx"), ("Up", b"\x1b[A"),
     ("echo é", "echo é".encode()), ("C-", b"C-"), ("", b"")],
)  # fmt: skip
def test_keys_have_the_names_that_tmux_gives_them(key: str, sent: bytes) -> None:
    assert encoded(key) == sent
