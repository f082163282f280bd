"""OpenRLHF: doubles of its base class and of answers of vLLM; tests/heavy has the class."""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from tests.fixtures.doc_blocks import doc_blocks
from tests.unit.integrations.fakes import CALL, END, FakeEpisode, FakePool, LetterTokenizer


class AgentExecutorBase:
    """As ``openrlhf.utils.agent`` has it, without its abstract method."""


class Engine:
    """Answers as vLLM does, with one text after the other."""

    def __init__(self, *texts: str) -> None:
        self.left = list(texts)
        self.limits: list[int] = []

    async def generate(self, ids: list[int], sampling_params: Any, multi_modal_data: Any) -> Any:
        assert multi_modal_data is None
        self.limits.append(sampling_params.max_tokens)
        written = [ord(letter) for letter in self.left.pop(0)]
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in written]
        answer = SimpleNamespace(token_ids=written, logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(outputs=[answer])


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> Any:
    agent = ModuleType("openrlhf.utils.agent")
    agent.AgentExecutorBase = AgentExecutorBase  # type: ignore[attr-defined]
    for name in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, agent.__name__, agent)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.2")
    monkeypatch.delitem(sys.modules, "aenv_ray.integrations.openrlhf", raising=False)
    return importlib.import_module("aenv_ray.integrations.openrlhf")


async def executed(
    openrlhf: Any, monkeypatch: pytest.MonkeyPatch, *episodes: FakeEpisode, label: str = "{}"
) -> tuple[dict[str, Any], Engine]:
    monkeypatch.setattr(openrlhf, "shared_pool", lambda *_, **__: FakePool(*episodes))
    executor = openrlhf.agent_executor("fake", void_retries=0)()
    assert isinstance(executor, AgentExecutorBase)
    engine = Engine(CALL + END, "done" + END)
    params = SimpleNamespace(max_tokens=None, logprobs=1)
    return await executor.execute("Go", label, params, 400, LetterTokenizer(), engine), engine


async def test_an_episode_has_tokens_ranges_and_log_probabilities(
    openrlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, engine = await executed(openrlhf, monkeypatch, FakeEpisode())
    text = LetterTokenizer().decode(found["observation_tokens"])
    written = [text[start:end] for start, end in found["action_ranges"]]
    assert written == [CALL + END, "done" + END]
    assert len(found["rollout_log_probs"]) == len(found["observation_tokens"])
    assert (found["reward"], found["scores"]) == (0.5, 0.5)
    assert found["extra_logs"] == {"aenv_void": 0.0}
    assert engine.limits[0] == 400 - text.index(CALL)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_void_episode_has_no_action(
    has_begun: bool, openrlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    void = FakeEpisode(is_lost=True, has_begun=has_begun)
    found, _ = await executed(openrlhf, monkeypatch, void)
    assert found["action_ranges"] == []
    assert found["extra_logs"] == {"aenv_void": 1.0}
    assert len(found["observation_tokens"]) > 1


async def test_a_label_that_is_no_task_is_refused(
    openrlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="not a task as JSON object"):
        await executed(openrlhf, monkeypatch, FakeEpisode(), label="42")


def test_the_docs_have_it_too(openrlhf: Any) -> None:
    del openrlhf
    found: dict[str, Any] = {}
    exec(doc_blocks("openrlhf")[0], found)
    assert issubclass(found["AgentExecutor"], AgentExecutorBase)


def test_the_example_has_the_class_that_openrlhf_asks_for(openrlhf: Any) -> None:
    del openrlhf
    example = Path(__file__).parents[3] / "examples/integrations/trainers/openrlhf_agent.py"
    assert issubclass(runpy.run_path(str(example))["AgentExecutor"], AgentExecutorBase)
