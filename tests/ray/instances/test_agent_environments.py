"""An agent as an environment, on a real Ray; services run `examples/chat-agent` likewise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.models import ToolResult

AGENTS = Path(__file__).parents[2] / "fixtures" / "chat_agents.py"


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The agents as a module that no package contains, as those of a user."""
    spec = spec_from_file_location("chat_agents", AGENTS)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chat_agents", module)
    spec.loader.exec_module(module)
    return module


def test_an_agent_streams_its_answer_remembers_and_is_rewarded(
    make: Callable[..., Any], agents: Any, tmp_path: Path
) -> None:
    import ray

    project = aenv_ray.agent_env(
        agents.in_pieces, name="helper", reward=agents.count, network="none", directory=tmp_path
    )
    env = make(project)
    said = {"message": "one two"}
    reports = [ray.get(one) for one in env.stream_tool.remote("chat", said)]
    assert [report[2] for report in reports[:-1]] == ["one ", "two "]
    assert isinstance(reports[-1], ToolResult)
    assert reports[-1].text() == "one two "
    ray.get(env.call_tool.remote("chat", said))
    assert ray.get(env.call_reward.remote()) == 2.0
    assert ray.get(env.reset.remote()).clean
    assert ray.get(env.call_function.remote("history")) == []
    assert ray.get(env.call_reward.remote()) == 0.0
