"""Exports: chat messages, preference pairs and a table of steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from aenv_ray.trajectories.export import (
    STEP_COLUMNS,
    NoPair,
    chat,
    pairs,
    step_rows,
)
from aenv_ray.trajectories.schema import Episode, EpisodeStatus
from tests.unit.trajectories.episodes import episode, step

TALK = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "done"},
)


def preferences(episodes: Iterable[Episode], min_gap: float = 0.0) -> list[dict[str, Any]]:
    return [pair for pair in pairs(episodes, min_gap) if not isinstance(pair, NoPair)]


def test_steps_become_messages_with_tool_calls() -> None:
    (row,) = chat([episode(0, steps=(step("hi", call_id="c1"),))])
    user, call, result, end = row["messages"]
    assert user == {"role": "user", "content": "say hello"}
    (made,) = call["tool_calls"]
    assert (made["id"], made["function"]["name"]) == ("c1", "echo")
    assert json.loads(made["function"]["arguments"]) == {"text": "hello"}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "hi"}
    assert end == {"role": "assistant", "content": "done"}


def test_a_recorded_conversation_is_exported_as_it_is() -> None:
    (row,) = chat([episode(0, messages=TALK)])
    assert row == {"messages": list(TALK)}


def test_void_episodes_are_no_examples() -> None:
    """Invariant 2: an infrastructure failure never becomes a training signal."""
    void = episode(0, None, status=EpisodeStatus.INFRA_FAILED)
    assert list(chat([void])) == []
    assert preferences([void, episode(1, 1.0)]) == []


def test_a_group_gives_its_best_and_its_worst_episode() -> None:
    answers = [(0.5, "fair"), (0.0, "bad"), (1.0, "good")]
    group = [
        episode(
            n,
            r,
            task_id="t",
            group="g",
            messages=[*TALK[:2], {"role": "assistant", "content": text}],
        )
        for n, (r, text) in enumerate(answers)
    ]
    (pair,) = preferences([*group, episode(9, 1.0, task_id="t", group="alone")])
    assert pair["prompt"] == list(TALK[:2])
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("good", "bad")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    assert preferences(group, min_gap=1.0) == []


def test_groups_of_joined_runs_are_kept_apart() -> None:
    """Each run numbers the groups of its tasks, in its own order."""
    rewards = [("a", 0.0), ("a", 0.4), ("b", 0.6), ("b", 1.0)]
    joined = [
        episode(n, reward, task_id=task, group="0", output=f"o{n}")
        for n, (task, reward) in enumerate(rewards)
    ]
    assert [
        (pair["task_id"], pair["chosen_reward"], pair["rejected_reward"])
        for pair in preferences(joined)
    ] == [("a", 0.4, 0.0), ("b", 1.0, 0.6)]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_an_episode_without_an_answer_hides_no_pair(order: tuple[int, ...]) -> None:
    """As one whose first call hung, or that a filter refused, among equally bad ones."""
    group = [
        episode(0, 1.0, task_id="t", group="g", messages=TALK),
        episode(1, 0.0, task_id="t", group="g", messages=TALK),
        episode(2, 0.0, task_id="t", group="g", messages=TALK[:2]),
    ]
    (pair,) = preferences([group[n] for n in order])
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)
    assert pair["rejected"] == [TALK[2]]


def test_the_worst_episode_begins_as_the_best_one_does() -> None:
    other = ({"role": "user", "content": "stop"}, TALK[2])
    group = [
        episode(n, reward, task_id="t", messages=talk)
        for n, (reward, talk) in enumerate([(1.0, TALK), (0.0, other), (0.5, TALK)])
    ]
    (pair,) = pairs(group)
    assert isinstance(pair, dict)
    assert pair["rejected_reward"] == 0.5


def test_a_group_without_a_pair_says_why() -> None:
    other = ({"role": "user", "content": "stop"}, TALK[2])
    assert list(pairs([episode(0, 1.0, messages=TALK)])) == [NoPair.NO_ANSWER]
    prompts = [episode(n, n, task_id="t", messages=one) for n, one in enumerate((TALK, other))]
    assert list(pairs(prompts)) == [NoPair.OTHER_PROMPTS]
    equal = [episode(n, 1.0, task_id="t", messages=TALK) for n in range(2)]
    assert list(pairs(equal)) == [NoPair.EQUAL]


def test_without_groups_the_episodes_of_a_task_are_one() -> None:
    same = [episode(n, float(n), task_id="t", output=f"o{n}") for n in range(2)]
    (pair,) = preferences(same)
    assert pair["task_id"] == "t"
    other = same[1].model_copy(update={"environment_digest": "sha256:other"})
    assert preferences([same[0], other]) == []


def test_step_rows_are_flat() -> None:
    rows = list(step_rows([episode(3, 0.5, steps=(step(), step("x", is_error=True)))]))
    assert set(rows[0]) == set(STEP_COLUMNS)
    assert [(r["index"], r["step"], r["text"], r["is_error"]) for r in rows] == [
        (3, 0, "hello", False),
        (3, 1, "x", True),
    ]
    assert all(isinstance(v, str | int | float | bool | None) for v in rows[0].values())
