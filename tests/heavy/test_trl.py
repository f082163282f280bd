"""TRL trains a tiny model, randomly initialised, on a real environment."""

from __future__ import annotations

import importlib.resources
import json
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.trl import Environments
from aenv_ray.sampling import EpisodeStatus
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.fixtures.listed_tools import (
    CHOICES,
    CHOSEN,
    ILLEGAL,
    NAMES,
    TREE,
    arguments,
    listed_project,
)

CALLS = [
    f'<tool_call>\n{{"name": "step", "arguments": {{"action": {action}}}}}\n</tool_call>'
    for action in (0, 1)
]
ENDS = ["<|im_end|>", "<|endoftext|>"]
GENERATIONS = 4
EXAMPLE = Path(__file__).parents[2] / "examples/integrations/trainers/train_trl.py"
AGENT_TOOLS = Path(__file__).parents[1] / "fixtures" / "projects" / "agent-tools"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, two tool calls that are one token each, and the end of a message."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    made.add_special_tokens(["<|im_start|>", *ENDS])
    template = importlib.resources.files("trl") / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=ENDS[0], pad_token=ENDS[1],
        chat_template=template.read_text(),
    )  # fmt: skip


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _trainer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, environments: Any, to: Path
) -> GRPOTrainer:
    words = [tokenizer.convert_tokens_to_ids(word) for word in (*CALLS, ENDS[0])]
    others = sorted(set(range(len(tokenizer))) - set(words))
    config = GRPOConfig(
        output_dir=str(to), max_steps=2, per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS, max_completion_length=600, learning_rate=0.05, use_cpu=True,
        bf16=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        max_tool_calling_iterations=3, gradient_checkpointing=False,
        generation_kwargs={"suppress_tokens": others}, seed=1,
    )  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": "Go."}], "id": f"row{number}", "seed": number}
        for number in range(4)
    ]
    return GRPOTrainer(
        model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        environment_factory=environments, callbacks=[environments.callback()],
    )  # fmt: skip


def test_two_steps_of_grpo_change_the_weights(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: EpisodePool,
    tmp_path: Path,
) -> None:
    trainer = _trainer(model, tokenizer, Environments(pool, only=["step"]), tmp_path)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 2
    assert any(line["loss"] != 0 for line in logged)
    assert any(not torch.equal(before[name], value) for name, value in model.named_parameters())
    pool.close()
    records = list(trajectories.read(tmp_path / "episodes.jsonl"))
    assert len(records) == 2 * GENERATIONS
    assert {record.status for record in records} == {EpisodeStatus.COMPLETED}
    assert {record.policy_versions for record in records} == {(0,), (1,)}
    assert any(record.steps for record in records)
    played = sum(0.0 if record.reward is None else record.reward for record in records)
    assert sum(line["reward"] for line in logged) * GENERATIONS == pytest.approx(played, abs=1e-4)


def test_a_lost_sandbox_is_masked_and_the_step_goes_on(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: EpisodePool,
    tmp_path: Path,
) -> None:
    """Its advantage is 0, and the others have the mean of the rest."""
    environments = Environments(pool, only=["step"])
    trainer = _trainer(model, tokenizer, environments, tmp_path)
    begin = pool.begin_blocking
    lost: list[str] = []

    def begin_and_lose(task: Any) -> Any:
        episode = begin(task)
        if len(lost) < 1 and episode.instance_id is not None:
            lost.append(episode.instance_id)
            import ray

            ray.get(aenv_ray.get(episode.instance_id).release.remote())
        return episode

    pool.begin_blocking = begin_and_lose  # type: ignore[method-assign]
    advantages: list[torch.Tensor] = []
    score = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        found = score(inputs)
        advantages.append(found["advantages"])
        return found

    trainer._generate_and_score_completions = scored
    trainer.train()
    pool.close()
    records = list(trajectories.read(tmp_path / "episodes.jsonl"))
    void = [record for record in records if record.instance_id in lost]
    assert [(record.status, record.reward) for record in void] == [
        (EpisodeStatus.INFRA_FAILED, None)
    ]
    assert len(records) == 2 * GENERATIONS
    assert advantages[0][0] == 0
    assert torch.isfinite(advantages[0]).all()


@pytest.fixture
def made(pool: EpisodePool) -> Any:
    return Environments(pool, observe="get_observation")()


def test_tools_have_schemas_under_names_that_trl_leaves_free(made: Any) -> None:
    schemas = {
        name: get_json_schema(getattr(made, name))["function"]
        for name, member in vars(type(made)).items()
        if callable(member) and not name.startswith("_")
    }
    assert {"step", "get_observation", "leave"} <= schemas.keys()
    assert schemas["step"]["parameters"]["properties"]["action"]["type"] == "integer"
    assert schemas["step"]["parameters"]["required"] == ["action"]
    [lamp] = schemas.keys() - {"step", "get_observation", "leave"}
    assert lamp.startswith("reset")
    assert "red" not in schemas[lamp]["parameters"].get("required", [])


async def test_a_rollout_is_reset_called_and_scored(made: Any) -> None:
    assert '"place"' in made.reset(prompt="Go.", seed=2)
    assert "terminated" in await made.step(action=1)
    with pytest.raises(Exception, match="7 is no step"):
        await made.step(action=7)
    assert await made.get_reward() == pytest.approx(-0.1)
    assert await made.get_reward() == pytest.approx(-0.1)


async def test_an_agent_that_ends_its_sandbox_has_a_reward(made: Any) -> None:
    made.reset(seed=0)
    with pytest.raises(Exception, match="is gone"):
        await made.leave()
    assert await made.get_reward() == 0.0


def test_what_cannot_be_offered_is_refused(pool: EpisodePool) -> None:
    with pytest.raises(ConfigError, match="no tool 'nope'"):
        Environments(pool, only=["nope"])()


async def test_names_arguments_and_schemas_that_methods_cannot_have(tmp_path: Path) -> None:
    """They arrive under their own names, or are refused."""
    names = (*NAMES, "a-b", "1st")
    use, own = arguments(*names), {name: number for number, name in enumerate(names)}
    with EpisodePool(listed_project(tmp_path / "use", use=use, choose=CHOICES)) as pool:
        rollout: Any = Environments(pool)()
        rollout.reset()
        legal = get_json_schema(rollout.use)["function"]["parameters"]["properties"]
        given = dict(zip(legal, own.values(), strict=True))
        assert json.loads(await rollout.use(**given)) == own
        assert json.loads(await rollout.choose(**CHOSEN)) == CHOSEN
    listed = {name: arguments("number") for name in ILLEGAL}
    with EpisodePool(listed_project(tmp_path / "illegal", **listed)) as pool:
        rollout = Environments(pool)()
        rollout.reset()
        names = [name for name in vars(type(rollout)) if not name.startswith("_")]
        for number, name in enumerate(names):
            assert json.loads(await getattr(rollout, name)(number=number)) == {"number": number}
        called = [step.tool for step in rollout._episode.finish().episode.steps]
        assert called == list(ILLEGAL)
    refused = pytest.raises(ConfigError, match=r"tool 'tree': .* contains itself")
    with EpisodePool(listed_project(tmp_path / "tree", tree=TREE)) as pool, refused:
        Environments(pool)()


async def test_an_image_of_a_tool_is_one_for_the_model() -> None:
    with EpisodePool(AGENT_TOOLS) as pool:
        rollout: Any = Environments(pool, only=["draw"])()
        rollout.reset()
        image, text = await rollout.draw()
        assert (image["type"], image["image"].size, text["type"]) == ("image", (1, 1), "text")


def test_the_factory_can_be_sent_to_another_process(pool: EpisodePool) -> None:
    copy = pickle.loads(pickle.dumps(Environments(pool, only=["step"])))
    with copy.pool:
        rollout = copy()
        rollout.reset(seed=1)
        assert rollout._episode.call_tool("get_observation").data["info"]["place"] == 1


@pytest.fixture
def saved(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """Return the directory of the model and its tokenizer."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_example_runs(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE))["main"](saved, steps="1")
    assert "trained 1" in capsys.readouterr().out


def test_the_docs_train(saved: str, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(doc_blocks("trl")[0], found)
    args = GRPOConfig(
        output_dir=str(tmp_path / "trained"), max_steps=1, num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS, use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    found["train"](saved, args)
    assert (tmp_path / "trained" / "checkpoint-1").is_dir()


def test_a_killed_training_leaves_no_instance(saved: str, tmp_path: Path) -> None:
    kill_once_it_acts(EXAMPLE, saved, "mini-terminal", "100000", directory=tmp_path)
