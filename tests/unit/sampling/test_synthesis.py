"""Synthesis: only tasks whose rewards are right are kept, and the others are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.sampling.synthesize import _proposals
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus, Sampling, Task
from aenv_ray.sampling.policies.scripted import reference
from aenv_ray.sampling.synthesis import DropReason, Synthesizer, proposals_of

COMPLETED, VOID = EpisodeStatus.COMPLETED, EpisodeStatus.INFRA_FAILED
GOOD = {"reference": [1.0, 1.0], "null": [0.0, 0.0]}


def _proposal(name: str, instruction: str = "", **more: Any) -> dict[str, Any]:
    solution = [{"tool": "solve", "arguments": {"of": name}}]
    return {"id": name, "instruction": instruction or name, "reference": solution} | more


class _Played:
    """Plays samplings by a table: the rewards of a task, by policy; a status instead is one."""

    def __init__(self, outcomes: dict[str, dict[str, list[Any]]]) -> None:
        self._outcomes = outcomes
        self.played: list[str] = []

    def __call__(self, sampling: Sampling) -> None:
        name = "reference" if sampling._policy is reference else "null"
        tasks = sampling._tasks.known
        assert tasks is not None
        for index, task in enumerate(tasks):
            outcome = self._outcomes.get(task.id, GOOD)[name][index % 2]
            status = outcome if isinstance(outcome, EpisodeStatus) else COMPLETED
            reward = None if isinstance(outcome, EpisodeStatus) else outcome
            self.played.append(f"{name} {task.id}")
            sampling._held.append(
                Episode(
                    index=index, task_id=task.id, status=status, reward=reward, error=f"{status}: x"
                )
            )


def _checked(
    outcomes: dict[str, dict[str, list[Any]]], *proposals: Any, **options: Any
) -> tuple[list[str], dict[int, DropReason], _Played]:
    play = _Played(outcomes)
    found = Synthesizer("e", repetitions=2, play=play, **options).check(proposals)
    assert found.proposed == len(proposals) == len(found.kept) + len(found.dropped)
    assert sum(found.counts().values()) == len(found.dropped)
    assert all(one.detail for one in found.dropped)
    return (
        [one.id for one in found.kept],
        {one.number: one.reason for one in found.dropped},
        play,
    )


@pytest.mark.parametrize(
    ("policy", "rewards", "reason"),
    [
        ("reference", [0.0, 0.0], DropReason.REFERENCE_FAILED),
        ("reference", [0.99, 0.99], DropReason.REFERENCE_FAILED),
        ("reference", [None, None], DropReason.REFERENCE_FAILED),
        ("reference", [EpisodeStatus.REWARD_FAILED] * 2, DropReason.REFERENCE_FAILED),
        ("reference", [EpisodeStatus.POLICY_FAILED, 1.0], DropReason.UNSTABLE),
        ("reference", [1.0, 0.0], DropReason.UNSTABLE),
        ("reference", [1.0, 1.5], DropReason.UNSTABLE),
        ("reference", [1.0, VOID], DropReason.UNCHECKED),
        ("null", [0.5, 0.5], DropReason.NULL_REWARDED),
        ("null", [0.0, -1.0], DropReason.UNSTABLE),
        ("null", [VOID, VOID], DropReason.UNCHECKED),
    ],
)
def test_a_task_with_wrong_rewards_is_dropped(
    policy: str, rewards: list[Any], reason: DropReason
) -> None:
    kept, dropped, play = _checked({"b": GOOD | {policy: rewards}}, *map(_proposal, "abc"))
    assert kept == ["a", "c"]
    assert dropped == {1: reason}
    assert ("null b" in play.played) == (policy == "null"), "it is played no longer than necessary"


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [-1.0, -1.0], [EpisodeStatus.REWARD_FAILED] * 2])
def test_a_reward_may_reject_an_episode_without_calls_in_any_way(rewards: list[Any]) -> None:
    kept, _, _ = _checked({"a": GOOD | {"null": rewards}}, _proposal("a"))
    assert kept == ["a"]


def test_bounds_of_rewards_are_options() -> None:
    outcomes = {"a": {"reference": [0.9, 0.9], "null": [0.1, 0.1]}}
    options = {"pass_reward": 0.8, "null_reward": 0.2}
    assert _checked(outcomes, _proposal("a"), **options)[0] == ["a"]


def test_a_proposal_that_cannot_be_checked_is_not_played() -> None:
    kept, dropped, play = _checked(
        {},
        3,
        {"instruction": "no id"},
        {"id": "a"},
        _proposal("b", reward=None),
        _proposal("c", setup={"func": "x"}),
        _proposal("d"),
    )
    assert kept == ["d"]
    assert dropped == dict.fromkeys(range(5), DropReason.INVALID)
    assert set(play.played) == {"reference d", "null d"}


def test_duplicates_are_dropped_and_a_rejected_task_does_not_block_a_later_one() -> None:
    """The first that is confirmed is kept."""
    outcomes = {"wrong": GOOD | {"reference": [0.0, 0.0]}}
    kept, dropped, _ = _checked(
        outcomes,
        _proposal("known", "new"),
        _proposal("x", "Do  the KNOWN thing"),
        _proposal("wrong", "count"),
        _proposal("a", "count"),
        _proposal("b", "Count "),
        _proposal("a", "other"),
        _proposal("c", "count", setup={"function": "prepare"}),
        known=[Task(id="known", instruction="do the known thing")],
    )
    assert kept == ["a", "c"]
    assert dropped == dict.fromkeys((0, 1, 4, 5), DropReason.DUPLICATE) | {
        2: DropReason.REFERENCE_FAILED
    }


def test_a_dropped_task_may_be_proposed_again_and_a_kept_one_may_not() -> None:
    wrong = {"reference": [0.0, 0.0], "null": [0.0, 0.0]}
    outcomes = {"b": wrong}
    synthesizer = Synthesizer("e", repetitions=2, play=_Played(outcomes))
    first = synthesizer.check([_proposal("a"), _proposal("b")])
    assert [one.id for one in first.kept] == ["a"]
    del outcomes["b"]
    second = synthesizer.check([_proposal("b"), _proposal("c", "a")])
    assert [one.id for one in second.kept] == ["b"]
    assert [one.reason for one in second.dropped] == [DropReason.DUPLICATE]


def test_a_generator_is_read_up_to_its_limit_and_its_error_is_reported() -> None:
    def endless(seed: int) -> Iterator[dict[str, Any]]:
        for number in range(seed, 10**9):
            yield _proposal(f"t{number}")

    def failing(seed: int) -> Iterator[dict[str, Any]]:
        yield _proposal(f"t{seed}")
        raise ValueError("no idea")

    check = Synthesizer("e", repetitions=2, play=_Played({})).check
    assert [one.id for one in check(proposals_of(endless, 3, seed=7)).kept] == ["t7", "t8", "t9"]
    with pytest.raises(ConfigError, match="ValueError: no idea"):
        check(proposals_of(failing, 3, seed=0))


@pytest.mark.parametrize("wrong", [{"repetitions": 1}, {"null_reward": 1.0}])
def test_options_that_confirm_no_task_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Synthesizer("e", **wrong)


def test_a_kept_task_can_be_written_whatever_it_holds() -> None:
    """Otherwise one task would lose the results of all, after they were played."""
    odd = _proposal("a", "half \ud83d", image=b"\xff")
    no_task = {"id": "half \ud83d"}
    found = Synthesizer("e", repetitions=2, play=_Played({})).check(
        [odd, odd | {"id": "b"}, no_task]
    )
    (kept,) = found.recordable().kept
    assert Task.model_validate_json(kept.model_dump_json()) == kept
    assert kept.instruction == "half \ufffd"
    assert [one.number for one in found.dropped] == [1, 2]
    assert found.recordable().model_dump_json()


def test_a_file_of_proposals_may_have_some_that_are_no_tasks(tmp_path: Path) -> None:
    """As files that models write; only as many rows as asked for are read."""
    lines = [_proposal("a"), {"instruction": "no id"}, 3, _proposal("b"), _proposal("c")]
    path = tmp_path / "proposed.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "{broken")
    kept, dropped, _ = _checked({}, *_proposals(str(path), 4, 0))
    assert kept == ["a", "b"]
    assert dropped == {1: DropReason.INVALID, 2: DropReason.INVALID}
    with pytest.raises(ConfigError, match=r"proposed\.jsonl, line 6: Expecting"):
        Synthesizer("e", play=_Played({})).check(_proposals(str(path), 9, 0))
