"""GEM plays episodes by texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gem
import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.episodes import shared_pool
from tests.fixtures.killed_trainers import kill_once_it_acts

CORRIDOR = str(Path(__file__).parents[1] / "fixtures" / "projects" / "corridor")
FORWARDS = '<tool_call>{"name": "step", "arguments": {"action": 1}}</tool_call>'

gem.register(
    "corridor", "aenv_ray.integrations.gem:GemEnv", environment=CORRIDOR, only=["step"],
    tasks=[{"id": "go", "instruction": "Walk."}],
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def closed() -> Any:
    yield
    shared_pool(CORRIDOR).close()


def _lose(instance_id: Any) -> None:
    import ray

    ray.get(aenv_ray.get(instance_id).release.remote())


def test_gem_plays_an_episode() -> None:
    env = gem.make("corridor", max_turns=9)
    observation, info = env.reset(seed=3)
    assert observation.startswith("Walk.")
    assert '"name": "step"' in observation
    assert "leave" not in observation
    assert info == {"task_id": "go"}
    observation, reward, terminated, truncated, _ = env.step(FORWARDS)
    assert observation.startswith("<tool_response>")
    assert (reward, terminated, truncated) == (0.0, False, False)
    for wrong in ("{", "[]", '{"name": "nope", "arguments": {}}'):
        assert "Error" in env.step(f"<tool_call>{wrong}</tool_call>")[0]
    observation, reward, terminated, truncated, info = env.step("I have arrived.")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["void"] is False
    with pytest.raises(ConfigError, match="has ended"):
        env.step(FORWARDS)
    other = env.spawn()
    other.reset(seed=0)
    other.close()
    env.close()


def test_gem_truncates_long_and_lost_episodes() -> None:
    env = gem.make("corridor", max_turns=1)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(FORWARDS)
    assert (reward, terminated, truncated, info["void"]) == (-0.1, False, True, False)
    env.reset(seed=0)
    _lose(env.instance_id)
    _, reward, terminated, truncated, info = env.step(FORWARDS)
    assert (reward, terminated, truncated, info["void"]) == (0.0, False, True, True)
    env.close()


def test_gem_needs_a_task() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        gem.make("corridor", tasks=[])


STEPS = f"""
from aenv_ray.integrations.gem import GemEnv

env = GemEnv({CORRIDOR!r}, [{{"id": "go"}}], max_turns=1000000)
env.reset(seed=0)
print("begun")
while True:
    env.step('<tool_call>{{"name": "get_observation"}}</tool_call>')
"""


def test_a_killed_loop_leaves_no_instance(tmp_path: Path) -> None:
    kill_once_it_acts(STEPS, directory=tmp_path)
