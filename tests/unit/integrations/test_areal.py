"""AReaL: doubles of its engine, requests and base class; tests/heavy has its own classes."""

from __future__ import annotations

import importlib
import importlib.metadata
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from aenv_ray.errors import ConfigError
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.listed_tools import TREE
from tests.unit.integrations.fakes import CALL, END, FakeEpisode, FakePool, LetterTokenizer

EXAMPLE = Path(__file__).parents[3] / "examples/integrations/trainers/areal_workflow.py"


class Generation:
    """As ``GenerationHyperparameters``: `new` returns a changed copy."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update({"max_new_tokens": 400, **fields})

    def new(self, **fields: Any) -> Generation:
        return Generation(**{**self.__dict__, **fields})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Generation:
        return self.new(stop_token_ids=[tokenizer.eos_token_id])


class Engine:
    """Answers requests with one text after the other, each by newer weights."""

    def __init__(self, *texts: str) -> None:
        self.left = list(texts)
        self.requests: list[Any] = []

    async def agenerate(self, request: Any) -> Any:
        self.requests.append(request)
        written = [ord(letter) for letter in self.left.pop(0)]
        return SimpleNamespace(
            output_tokens=written, output_logprobs=[-0.5] * len(written), stop_reason="stop",
            output_versions=[len(self.requests)] * len(written),
        )  # fmt: skip


class Chat:
    """The part of the OpenAI client that is used."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request: Any) -> Any:
        Chat.asked.append({**request, "messages": list(request["messages"])})
        calls = None
        if request["messages"][-1]["role"] != "tool":
            function = SimpleNamespace(name="add", arguments='{"a": 1}')
            calls = [SimpleNamespace(id="1", function=function)]
        message = SimpleNamespace(
            tool_calls=calls, model_dump=lambda **_: {"role": "assistant", "content": "…"}
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.fixture
def areal(monkeypatch: pytest.MonkeyPatch) -> Any:
    api, openai = ModuleType("areal.api"), ModuleType("openai")
    api.RolloutWorkflow = object  # type: ignore[attr-defined]
    api.ModelRequest = SimpleNamespace  # type: ignore[attr-defined]
    openai.AsyncOpenAI = Chat  # type: ignore[attr-defined]
    for module in (ModuleType("areal"), api, openai):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.4")
    monkeypatch.delitem(sys.modules, "aenv_ray.integrations.areal", raising=False)
    return importlib.import_module("aenv_ray.integrations.areal")


def plays(areal: Any, monkeypatch: pytest.MonkeyPatch, *episodes: FakeEpisode) -> None:
    monkeypatch.setattr(areal, "shared_pool", lambda *_, **__: FakePool(*episodes))


ROW = {"messages": [{"role": "user", "content": "Go"}], "aenv": {"id": "t"}}


async def test_a_workflow_returns_what_the_engine_wrote(
    areal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(areal, monkeypatch, episode := FakeEpisode())
    monkeypatch.setattr(areal, "_tensors", lambda tokens, outcome: (tokens, outcome.reward))
    engine = Engine(CALL + END, "done" + END)
    workflow = areal.AenvWorkflow("fake", Generation(), LetterTokenizer())
    tokens, reward = await workflow.arun_episode(engine, ROW)
    assert reward == 0.5
    assert episode.policy_versions == [1, 2]
    assert {version for version in tokens.versions if version > 0} == {1, 2}
    first, second = engine.requests
    assert first.rid == second.rid
    assert second.gconfig.max_new_tokens == 400 - len(second.input_ids) + len(first.input_ids)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_void_trajectory_is_rejected(
    has_begun: bool, areal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    void = FakeEpisode(is_lost=True, has_begun=has_begun)
    plays(areal, monkeypatch, void)
    workflow = areal.AenvWorkflow("fake", Generation(), LetterTokenizer(), void_retries=0)
    assert await workflow.arun_episode(Engine(CALL + END), ROW) is None
    plays(areal, monkeypatch, FakeEpisode(is_lost=True, has_begun=has_begun))
    with pytest.raises(areal.VoidEpisode):
        await areal.AenvAgent("fake").run(ROW, base_url="http://proxy", http_client=object())


async def test_a_schema_that_contains_itself_is_no_outcome(
    areal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a mistake of the environment, which no reward of 0 must hide."""
    plays(areal, monkeypatch, one := FakeEpisode(schema=TREE), other := FakeEpisode(schema=TREE))
    workflow = areal.AenvWorkflow("fake", Generation(), LetterTokenizer())
    pool = areal.shared_pool()
    monkeypatch.setattr(areal, "shared_pool", lambda *_, **__: pool)
    with pytest.raises(ConfigError, match="contains itself"):
        await workflow.arun_episode(Engine(), ROW)
    with pytest.raises(ConfigError, match="contains itself"):
        await areal.AenvAgent("fake").run(ROW, base_url="http://proxy", http_client=object())
    assert (one.is_abandoned, other.is_abandoned) == (True, True)


async def test_an_agent_plays_by_the_client_of_openai(
    areal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(areal, monkeypatch, FakeEpisode())
    Chat.asked.clear()
    agent = areal.AenvAgent("fake", request={"temperature": 0.7})
    reward = await agent.run(ROW, base_url="http://proxy", api_key="k", http_client=object())
    assert (type(reward), reward) == (float, 0.5)
    assert [request["temperature"] for request in Chat.asked] == [0.7, 0.7]
    assert Chat.asked[1]["messages"][-1]["content"] == "2"
    assert pickle.loads(pickle.dumps(agent))._environment == "fake"


def trained_with(train: Any) -> dict[str, Any]:
    """Return what a function gives to AReaL's trainer, which gets it with its configuration."""
    given: dict[str, Any] = {}
    trainer = SimpleNamespace(train=lambda **options: given.update(options))
    train(trainer, SimpleNamespace(gconfig=Generation(), tokenizer_path=LetterTokenizer()))
    return given


@pytest.mark.parametrize("source", ["docs", "example"])
async def test_the_workflow_of_docs_and_example_plays(
    source: str, areal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "docs":
        found: dict[str, Any] = {}
        exec(doc_blocks("areal")[0], found)
        given = trained_with(found["train"])
    else:
        train = runpy.run_path(str(EXAMPLE))["train"]
        given = trained_with(lambda trainer, config: train(trainer, config, "mini-terminal"))
    module, _, name = given["workflow"].rpartition(".")
    workflow = getattr(importlib.import_module(module), name)(**given["workflow_kwargs"])
    pools: list[Any] = []

    def pool(*arguments: Any, **options: Any) -> FakePool:
        pools.append((arguments, options))
        return FakePool(FakeEpisode())

    monkeypatch.setattr(areal, "shared_pool", pool)
    monkeypatch.setattr(areal, "_tensors", lambda tokens, outcome: outcome.reward)
    assert await workflow.arun_episode(Engine(CALL + END, "done" + END), ROW) == 0.5
    assert pools == [(("mini-terminal",), {} if source == "docs" else {"out": "episodes"})]
