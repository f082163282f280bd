"""The view of a run on a terminal, and its lines elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from aenv_ray.cli.sampling import live_view
from aenv_ray.sampling import Episode, EpisodeStatus, Usage
from aenv_ray.sampling.progress import Progress


def progress(*episodes: Episode, total: int | None = 8, waiting: int = 0) -> Progress:
    found = Progress(total, playing=lambda: 5 if episodes else 0, waiting=lambda: waiting)
    for episode in episodes:
        found.add(episode)
    return found


def episode(reward: float | None, status: str = "completed", **fields: Any) -> Episode:
    return Episode(index=0, task_id="t", status=EpisodeStatus(status), reward=reward, **fields)


def drawn(found: Progress) -> str:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(live_view.screen(found.view()))
    return out.getvalue()


def test_the_screen_shows_outcomes_rewards_and_failures() -> None:
    screen = drawn(
        progress(
            episode(1.0, create_s=0.02, usage=Usage(prompt_tokens=1200, completion_tokens=34)),
            episode(0.0),
            episode(None, "infra_failed", error="node_lost: it is gone"),
        )
    )
    assert "3/8" in screen
    assert "5 playing, 2 completed, 1 infra_failed" in screen
    assert "1,200 read, 34 written" in screen
    assert "create p50 20.0 ms" in screen
    assert "mean 0.500" in screen
    assert "1 × node_lost" in screen


def test_the_screen_of_a_run_that_begins_has_no_figures() -> None:
    screen = drawn(progress(total=None))
    assert "0 playing" in screen
    assert "tokens" not in screen
    assert "create p50 -, call p50 -" in screen
    assert "rewards" not in screen


def test_a_line_says_the_same() -> None:
    line = live_view.line(
        progress(
            episode(1.0, usage=Usage(prompt_tokens=7, completion_tokens=5)),
            episode(None, "policy_failed", error="E: x"),
        ).view()
    )
    assert line.startswith("2/8 episodes, 5 playing, ")
    assert "12 tokens" in line
    assert "reward 1.000" in line
    assert "E 1" in line


def test_episodes_that_wait_for_room_in_the_cluster_are_a_state() -> None:
    """A full cluster is the most frequent reason why a run makes no progress."""
    found = progress(episode(1.0), waiting=4)
    assert live_view.line(found.view()).startswith("1/8 episodes, 5 playing, 4 waiting for room, ")
    assert "5 playing, 4 waiting for room, 1 completed" in drawn(found)


def test_errors_cannot_control_the_terminal() -> None:
    found = progress(episode(None, "policy_failed", error="\x1b[2Jcode: message"))
    assert "\x1b" not in live_view.line(found.view())
    assert "\x1b" not in drawn(found)


def test_durations() -> None:
    shown = [live_view.duration(seconds) for seconds in (0.4, 59.2, 200, 18_420)]
    assert shown == ["0 s", "59 s", "3 min 20 s", "5 h 7 min"]
