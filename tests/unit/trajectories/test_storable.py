"""Whatever an agent writes, its episode can be recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step

LONE = "a\ud800b"
DEEP: Any = "x"
for _ in range(50_000):
    DEEP = {"k": DEEP}
LESS_DEEP: Any = "x"
for _ in range(220):  # is written, and not read again
    LESS_DEEP = {"k": LESS_DEEP}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (
            {"text": LONE, LONE: [LONE, 1, None]},
            {"text": "a\ufffdb", "a\ufffdb": ["a\ufffdb", 1, None]},
        ),
        ({"text": "ü\U0001f600"}, {"text": "ü\U0001f600"}),
        (DEEP, {"": "[nested too deeply to be recorded]"}),
        (LESS_DEEP, {"": "[nested too deeply to be recorded]"}),
        ({"many": [[n] for n in range(500)]}, {"many": [[n] for n in range(500)]}),
    ],
    ids=["lone surrogates", "text", "deep", "less deep", "wide"],
)
def test_an_episode_is_recorded_whatever_its_agent_wrote(
    value: dict[str, Any], stored: dict[str, Any]
) -> None:
    """Otherwise one agent would end the run of all."""
    step = Step(tool=LONE, arguments=value, text=LONE, is_error=False, duration_s=0.0)
    episode = Episode(
        index=0,
        task_id="t",
        status=EpisodeStatus.COMPLETED,
        reward=1.0,
        reward_detail=value,
        steps=(step,),
        messages=(value,),
        output=value,
        error=LONE,
    )
    read = Episode.model_validate(json.loads(episode.model_dump_json()))
    assert Episode.model_validate_json(episode.model_dump_json()) == read
    assert read.steps[0].arguments == read.output == read.reward_detail == stored
    assert read.messages == (stored,)
    assert (read.steps[0].text, read.steps[0].tool, read.error) == ("a\ufffdb",) * 3
