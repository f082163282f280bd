"""Token by token: what a trainer gets from turns of a model, and what SLIME gets of it."""

from __future__ import annotations

import asyncio
import runpy
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.integrations import slime
from aenv_ray.integrations.support.token_loop import (
    Tokens,
    hermes_calls,
    played,
    task_of_column,
    turns,
)
from aenv_ray.trajectories.schema import Generation
from tests.fixtures.doc_blocks import doc_blocks
from tests.unit.integrations.fakes import CALL, END, FakeEpisode, FakePool, LetterTokenizer, model

EXAMPLE = Path(__file__).parents[4] / "examples/integrations/trainers/slime_rollouts.py"


def acting(*texts: str, max_tokens: int = 1000) -> Any:
    prompt = [{"role": "user", "content": "Go"}]
    return lambda episode: turns(
        episode, LetterTokenizer(), prompt, model(*texts), max_tokens=max_tokens
    )


async def test_the_models_own_tokens_are_kept_and_the_environments_are_masked() -> None:
    pool = FakePool(episode := FakeEpisode())
    outcome, tokens = await played(pool, {}, acting(CALL + END, "done" + END))  # type: ignore[arg-type]
    assert tokens is not None
    assert (outcome.reward, episode.policy_versions) == (0.5, [3])
    text = LetterTokenizer().decode(tokens.response_ids)
    assert text == f"{CALL}{END}\nt:2{END}\na:done{END}"
    written = [chr(i) for i, mask in zip(tokens.response_ids, tokens.mask, strict=True) if mask]
    assert "".join(written) == f"{CALL}{END}done{END}"
    assert {p for p, mask in zip(tokens.logprobs, tokens.mask, strict=True) if mask} == {-0.5}
    assert {v for v, mask in zip(tokens.versions, tokens.mask, strict=True) if not mask} == {-1}
    assert episode.generation == tokens.generation()


async def test_an_end_that_the_model_did_not_write_is_added_to_the_context() -> None:
    _, tokens = await played(FakePool(FakeEpisode()), {}, acting(CALL, "done" + END))  # type: ignore[arg-type]
    assert tokens is not None
    assert LetterTokenizer().decode(tokens.response_ids).startswith(f"{CALL}{END}\nt:2")
    assert tokens.mask[len(CALL)] == 0


async def test_a_call_that_is_no_json_is_answered_with_an_error() -> None:
    bad = "<tool_call>{oops</tool_call>" + END
    _, tokens = await played(FakePool(FakeEpisode()), {}, acting(bad, "done" + END))  # type: ignore[arg-type]
    assert tokens is not None
    assert "there is no tool ''" in LetterTokenizer().decode(tokens.response_ids)


async def test_a_limit_of_tokens_ends_the_turns() -> None:
    _, tokens = await played(
        FakePool(FakeEpisode()),
        {},
        acting(CALL + END, "x", max_tokens=len(CALL) + 3),  # type: ignore[arg-type]
    )
    assert tokens is not None
    assert tokens.is_truncated
    assert len(tokens.response_ids) <= len(CALL) + 3


async def test_a_void_episode_is_played_again_and_its_tokens_are_kept() -> None:
    pool = FakePool(FakeEpisode(is_lost=True), FakeEpisode(has_begun=False), FakeEpisode())
    act = acting(CALL + END, CALL + END, "done" + END)
    outcome, tokens = await played(pool, {}, act, void_retries=2)  # type: ignore[arg-type]
    assert not outcome.is_void
    assert tokens is not None
    lost, tokens = await played(FakePool(FakeEpisode(is_lost=True)), {}, acting(CALL + END))  # type: ignore[arg-type]
    assert lost.is_void
    assert tokens is not None
    assert tokens.turn_count == 1


async def test_a_cancelled_trainer_leaves_no_episode() -> None:
    started = asyncio.Event()

    async def act(episode: Any) -> Any:
        del episode
        started.set()
        await asyncio.Event().wait()

    pool = FakePool(episode := FakeEpisode())
    playing = asyncio.create_task(played(pool, {}, act))  # type: ignore[arg-type]
    await started.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert episode.is_abandoned


async def test_tokens_without_log_probabilities_leave_no_episode() -> None:
    """A mistake of the trainer ends its run, and not with an instance that nobody gives back."""

    async def act(episode: Any) -> Tokens:
        del episode
        return Tokens([1], [2, 3], [1, 1], [-0.5])

    with pytest.raises(ValueError, match="response_ids has 2, response_mask has 2, logprobs has 1"):
        await played(FakePool(episode := FakeEpisode()), {}, act)  # type: ignore[arg-type]
    assert episode.is_abandoned


def test_log_probabilities_that_are_not_finite_leave_the_record_readable() -> None:
    """JSON has no such numbers; a file with one of them could not be read at all."""
    found = Tokens([1], [2, 3], [1, 1], [float("-inf"), -0.5]).generation()
    assert found.logprobs is None
    assert Generation.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValueError, match="finite"):
        Generation(prompt_ids=(1,), response_ids=(2,), response_mask=(1,), logprobs=(float("nan"),))


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 200_000])
def test_a_call_that_python_cannot_read_is_one_that_is_no_json(value: str) -> None:
    """What a model writes must not end the training."""
    assert hermes_calls(f"<tool_call>{value}</tool_call>") == [("", "{}")]


async def test_a_template_that_changes_earlier_messages_is_refused() -> None:
    class Rewriting(LetterTokenizer):
        def apply_chat_template(
            self, conversation: list[dict[str, Any]], **options: Any
        ) -> list[int]:
            return [len(conversation), *super().apply_chat_template(conversation, **options)]

    with pytest.raises(ConfigError, match="changes earlier messages"):
        await turns(
            FakeEpisode(), Rewriting(), [{"role": "user", "content": "Go"}], model(CALL + END),  # type: ignore[arg-type]
            max_tokens=500,
        )  # fmt: skip


def test_a_field_that_other_rows_have_is_absent() -> None:
    """A task whose reward is None has none; a dataset puts it there for rows that do not say."""
    assert task_of_column({"id": "a", "reward": None, "seed": 0}) == {"id": "a", "seed": 0}
    assert task_of_column(None) == {}


# --- SLIME: a double of `Sample` and of the two functions that are called, August 2026 ----------


@dataclass
class Sample:
    """The fields of ``slime.utils.types.Sample`` that are read or set."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any = "Go"
    group_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_reward_value(self, args: Any) -> float:
        del args
        assert self.reward is not None
        return self.reward


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install doubles of SLIME's modules; return the requests to the model server."""
    requests: list[dict[str, Any]] = []
    texts = [CALL + END, "done" + END]

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        assert url == "http://router:1/generate"
        requests.append(payload)
        logprobs = [(-0.5, ord(letter), None) for letter in texts[(len(requests) - 1) % 2]]
        meta = {
            "output_token_logprobs": logprobs, "finish_reason": {"type": "stop"},
            "weight_version": "4",
        }  # fmt: skip
        return {"text": "", "meta_info": meta}

    rollout, http = ModuleType("slime.rollout.sglang_rollout"), ModuleType("slime.utils.http_utils")
    rollout.GenerateState = lambda args: SimpleNamespace(tokenizer=LetterTokenizer())  # type: ignore[attr-defined]
    http.post = post  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, rollout.__name__, rollout)
    monkeypatch.setitem(sys.modules, http.__name__, http)
    return requests


ARGS = SimpleNamespace(
    sglang_router_ip="router", sglang_router_port=1, advantage_estimator="grpo",
    rewards_normalization=True, grpo_std_normalization=False,
)  # fmt: skip


async def generated(monkeypatch: pytest.MonkeyPatch, *episodes: FakeEpisode) -> Any:
    monkeypatch.setattr(slime, "EpisodePool", lambda *_, **__: FakePool(*episodes))
    custom_generate = slime.rollouts("fake", void_retries=0)
    return await custom_generate(ARGS, Sample(), {"max_new_tokens": 900, "temperature": 1.0})


@pytest.mark.parametrize("installed", [None, "older"])
async def test_a_slime_that_is_missing_or_differs_is_named(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("slime", "slime.rollout", "slime.rollout.sglang_rollout")
    for name in names if installed else ():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigError, match="SLIME is not installed, or differs") as caught:
        await generated(monkeypatch, FakeEpisode())
    assert "github.com/THUDM/slime" in str(caught.value.hint)


async def test_slimes_sample_is_filled(
    sglang: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = await generated(monkeypatch, FakeEpisode())
    assert sample.status is Sample.Status.COMPLETED
    assert sample.reward == 0.5
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert sample.weight_versions == ["4", "4"]
    assert sglang[1]["input_ids"] == sample.tokens[: len(sglang[1]["input_ids"])]
    assert sglang[1]["return_logprob"]


async def test_slimes_reward_model_returns_the_rewards_of_episodes() -> None:
    """With ``--group-rm``, SLIME replaces those of a group with its answer."""
    samples = [Sample(reward=1.0), Sample(reward=0.25)]
    assert await slime.custom_rm(ARGS, samples[1]) == 0.25
    assert await slime.custom_rm(ARGS, samples, evaluation=False) == [1.0, 0.25]
    with pytest.raises(ConfigError, match="has no reward"):
        await slime.custom_rm(ARGS, [Sample()])


async def test_a_void_sample_is_removed_and_in_no_baseline(
    sglang: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del sglang
    void = await generated(monkeypatch, FakeEpisode(is_lost=True))
    unstarted = await generated(monkeypatch, FakeEpisode(has_begun=False))
    for sample in (void, unstarted):
        assert sample.remove_sample
        assert sample.status is Sample.Status.FAILED
        assert len(sample.loss_mask) == sample.response_length > 0
        sample.group_index = 0
    scored = [Sample(reward=1.0, group_index=0), Sample(reward=0.0, group_index=0)]
    raw, normalized = slime.post_process_rewards(ARGS, [void, *scored, unstarted])
    assert raw == [0.5, 1.0, 0.0, 0.5]
    assert normalized == [0.0, 0.5, -0.5, 0.0]


async def test_a_sample_that_slime_aborts_has_no_reward(
    sglang: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an answer says nothing about the policy."""
    del sglang

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        del url, payload
        meta = {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}
        return {"text": "", "meta_info": meta}

    monkeypatch.setattr(sys.modules["slime.utils.http_utils"], "post", post)
    sample = await generated(monkeypatch, episode := FakeEpisode())
    assert (sample.status, sample.reward) == (Sample.Status.ABORTED, None)
    assert episode.is_abandoned


@pytest.mark.parametrize("source", ["docs", "example"])
async def test_the_function_of_docs_and_example_fills_a_sample(
    source: str, sglang: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del sglang
    pools: list[Any] = []

    def pool(*arguments: Any, **options: Any) -> FakePool:
        pools.append((arguments, options))
        return FakePool(FakeEpisode())

    monkeypatch.setattr(slime, "EpisodePool", pool)
    if source == "docs":
        found: dict[str, Any] = {}
        exec(doc_blocks("slime")[0], found)
    else:
        found = runpy.run_path(str(EXAMPLE))
    sample = await found["custom_generate"](ARGS, Sample(), {"max_new_tokens": 900})
    assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.5)
    [((environment,), options)] = pools
    assert environment.partition("@")[0] == "mini-terminal"
    assert options == {"out": "episodes.jsonl"}
