"""verl's agent loop workers play batches on a real environment, with a scripted model."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.tools.tool_registry import load_all_tools
from verl.workers.rollout.replica import TokenOutput

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.engines.process.virtual_environment import find_uv
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodePool, LiveEpisode, shared_pool
from aenv_ray.integrations.support.tools import EnvironmentTools
from aenv_ray.integrations.verl import AenvAgentLoop, AenvTool
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
from tests.ray.faults import eventually

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "tests" / "fixtures" / "projects"
CORRIDOR, AGENT_TOOLS = str(PROJECTS / "corridor"), str(PROJECTS / "agent-tools")
EXAMPLE = ROOT / "examples" / "integrations" / "trainers" / "verl_dataset.py"
CONFIG = Path(verl.__file__).parent / "trainer" / "config"
END = "<|im_end|>"
STEP = '<tool_call>\n{"name": "step", "arguments": {"action": 1}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTHS = (3000, 400)
BEGUN = "begun"
"""File beside the model, made once the model is asked to stay."""


class ScriptedServer:
    """A client of verl's model servers: it walks once, and then answers; "Lose." ends sandboxes,
    and "Stay." waits."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def generate(self, request_id: str, *, prompt_ids: list[int], **options: Any) -> Any:
        del request_id, options
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        read = tokenizer.decode(prompt_ids)
        if "Lose." in read:
            for info in await asyncio.to_thread(aenv_ray.list_instances):
                await aenv_ray.get(info.id).release.remote()
        if "Stay." in read:
            await asyncio.to_thread(Path(self.path, BEGUN).touch)
            await asyncio.Event().wait()
        text = "Done." if "<|im_start|>tool" in read else STEP
        ids = tokenizer.encode(text + END, add_special_tokens=False)
        version = {"min_global_steps": 3, "max_global_steps": 3 if text == STEP else 4}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=version)


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the directory of a tokenizer of bytes, and of a configuration of a model."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(STEP, normalized=False)])
    made.add_special_tokens(["<|im_start|>", END, "<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    return str(path)


def made_manager(model: str) -> Any:
    """Return verl's manager of workers."""
    aenv_ray.init()
    with initialize_config_dir(str(CONFIG), version_base=None):
        config = compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm",
            f"data.max_prompt_length={LENGTHS[0]}", f"data.max_response_length={LENGTHS[1]}",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "actor_rollout_ref.rollout.calculate_log_probs=true", *_documented_options(),
        ])  # fmt: skip
    return AgentLoopManager.create(config=config, llm_client=ScriptedServer(model))


def _documented_options() -> list[str]:
    [command] = doc_blocks("verl", "text")
    return [word for word in command.split() if "=" in word]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Install aenv-ray for the workers as users install it, so that verl finds the plug-in."""
    target = tmp_path_factory.mktemp("installed")
    words = ("pip", "install", "--quiet", "--no-deps", "--python", sys.executable)
    subprocess.run([find_uv(), *words, "--target", str(target), str(ROOT)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(target), str(ROOT)]))
        yield str(target)


@pytest.fixture(scope="module")
def manager(model: str, installed: str) -> Any:
    del installed
    return made_manager(model)


def _batch(*texts: str) -> DataProto:
    """Return rows as the example writes them, of another environment."""
    row, *_ = runpy.run_path(str(EXAMPLE))["rows"]()
    assert row["extra_info"]["aenv"].keys() == {"environment", "task"}
    documented: dict[str, Any] = {}
    exec(doc_blocks("verl")[0], documented)
    assert documented["row"].keys() <= row.keys()
    assert documented["row"]["agent_name"] == row["agent_name"]
    given = [
        {"aenv": {"environment": CORRIDOR, "task": {"id": f"row{number}", "seed": 3}}}
        for number in range(len(texts))
    ]
    columns = {
        "raw_prompt": [[{"role": "user", "content": text}] for text in texts],
        "agent_name": [row["agent_name"]] * len(texts),
        "extra_info": given,
        "index": list(range(len(texts))),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto(non_tensor_batch=arrays)


def test_a_batch_is_played_by_the_plug_in(manager: Any, model: str) -> None:
    played = manager.generate_sequences(_batch("Walk.", "Walk."))
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert list(played.non_tensor_batch["aenv_void"]) == [False, False]
    assert played.batch["rm_scores"].sum(dim=-1).tolist() == [1.0, 1.0]
    written = tokenizer.decode(played.batch["responses"][0][played.batch["response_mask"][0] == 1])
    assert written == f"{STEP}{END}Done.{END}"
    shown = tokenizer.decode(played.batch["responses"][0])
    assert '"terminated"' in shown
    assert "reset_lamp" not in shown
    prompt = tokenizer.decode(played.batch["prompts"][0])
    assert '"lamp": {"additionalProperties": {"type": "integer"}' in prompt  # the whole schema
    logprobs = played.batch["rollout_log_probs"][0]
    assert logprobs[played.batch["response_mask"][0] == 1].unique().tolist() == [-0.5]
    assert list(played.non_tensor_batch["max_global_steps"]) == [4, 4]


def test_a_lost_sandbox_is_masked_and_the_batch_goes_on(manager: Any) -> None:
    played = manager.generate_sequences(_batch("Lose."))
    assert list(played.non_tensor_batch["aenv_void"]) == [True]
    assert played.batch["response_mask"].sum() == 0
    assert played.batch["attention_mask"][0, LENGTHS[0] :].sum() > 0


def test_the_example_writes_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.parquet"
    runpy.run_path(str(EXAMPLE))["main"](str(path))
    assert capsys.readouterr().out == "rows 1\n"
    [row] = pandas.read_parquet(path).to_dict("records")
    assert row["agent_name"] == "aenv"
    assert row["extra_info"]["aenv"]["task"]["id"] == "count"


def test_void_trajectories_are_in_no_mean() -> None:
    from aenv_ray.integrations.verl import grpo_without_void

    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    index = np.array(["a", "a", "a"], dtype=object)
    config = {"norm_adv_by_std_in_grpo": False}
    advantages, _ = grpo_without_void(rewards, mask, index, config)
    assert advantages.tolist() == [[0.5, 0.5, 0.0], [-0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


def _only_record(path: Path) -> Any:
    """Return the record of an episode that ends in the background."""
    return eventually(lambda: list(trajectories.read(path)) if path.exists() else [])[0]


@pytest.fixture
def tools_of_verl(manager: Any, tmp_path: Path) -> Iterator[list[Any]]:
    """Yield two tools of an environment as verl makes them of its file, with a pool of theirs."""
    del manager
    config = tmp_path / "tools.yaml"
    out = tmp_path / "episodes.jsonl"
    config.write_text("tools:\n" + "".join(
        f"  - {{class_name: aenv_ray.integrations.verl.AenvTool, config: {{type: native, "
        f"environment: {CORRIDOR}, tool: {name}, options: {{out: {out}}}}}}}\n"
        for name in ("step", "get_observation")
    ))  # fmt: skip
    made = load_all_tools(str(config), None)
    yield made
    made[0]._pool.close()


def _trajectory(seed: int) -> AgentData:
    return AgentData([], [], [], None, None, {}, "id", {"aenv": {"task": {"seed": seed}}})


async def test_tools_of_verls_own_loop_share_an_episode(
    tools_of_verl: list[Any], tmp_path: Path
) -> None:
    """It ends with the trajectory, since verl tells no tool when that is."""
    step, look = tools_of_verl
    trajectory = _trajectory(seed=2)
    for tool, given in ((step, {"action": 1}), (look, {})):
        instance_id, _ = await tool.create(create_kwargs={})
        response, _, _ = await tool.execute(instance_id, given, agent_data=trajectory)
        await tool.release(instance_id)
    assert '"place":3' in response.text
    del trajectory
    gc.collect()
    record = await asyncio.to_thread(_only_record, tmp_path / "episodes.jsonl")
    assert (record.status, len(record.steps)) == (EpisodeStatus.COMPLETED, 2)


async def test_a_lost_sandbox_marks_the_trajectory_of_verls_own_loop(
    tools_of_verl: list[Any], tmp_path: Path
) -> None:
    step, look = tools_of_verl
    trajectory = _trajectory(seed=0)
    await step.execute("1", {"action": 1}, agent_data=trajectory)
    for info in await asyncio.to_thread(aenv_ray.list_instances):
        await aenv_ray.get(info.id).release.remote()
    with pytest.raises(AenvError):
        await look.execute("2", {}, agent_data=trajectory)
    assert trajectory.extra_fields == {"aenv_void": True}
    del trajectory
    gc.collect()
    record = await asyncio.to_thread(_only_record, tmp_path / "episodes.jsonl")
    assert (record.status, record.reward) == (EpisodeStatus.INFRA_FAILED, None)


async def test_names_arguments_and_schemas_that_verl_cannot_express(
    manager: Any, tmp_path: Path
) -> None:
    """They arrive, or are refused."""
    del manager
    use, given = arguments(*NAMES), {name: number for number, name in enumerate(NAMES)}
    project = listed_project(tmp_path / "use", use=use, choose=CHOICES)
    trajectory = _trajectory(seed=0)
    for name, values in (("use", given), ("choose", CHOSEN)):
        tool = await asyncio.to_thread(
            AenvTool, {"type": "native", "environment": project, "tool": name}, None
        )
        response, _, _ = await tool.execute("1", values, agent_data=trajectory)
        assert json.loads(response.text) == values
    await asyncio.to_thread(tool._pool.close)
    listed = {name: arguments("number") for name in ILLEGAL}
    project = listed_project(tmp_path / "illegal", **listed)
    for number, name in enumerate(ILLEGAL):
        tool = await asyncio.to_thread(
            AenvTool, {"type": "native", "environment": project, "tool": name}, None
        )
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", tool.name)
        response, _, _ = await tool.execute("1", {"number": number}, agent_data=trajectory)
        assert json.loads(response.text) == {"number": number}
    await asyncio.to_thread(tool._pool.close)
    tree = {"environment": listed_project(tmp_path / "tree", tree=TREE), "tool": "tree"}
    with pytest.raises(ConfigError, match=r"tool 'tree': .* contains itself"):
        await asyncio.to_thread(AenvTool, tree, None)


async def test_a_cancelled_rollout_abandons_its_episode(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del manager
    begun, abandoned = asyncio.Event(), asyncio.Event()
    abandon = LiveEpisode.abandon

    async def wait(*_: Any, **__: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def note(episode: LiveEpisode) -> None:
        await abandon(episode)
        abandoned.set()

    monkeypatch.setattr(ToolAgentLoop, "run", wait)
    monkeypatch.setattr(LiveEpisode, "abandon", note)
    playing = object.__new__(AenvAgentLoop)
    options = {"infra_retries": 0}
    vars(playing).update(_environment=CORRIDOR, _only=None, _void_retries=1, _options=options)
    rollout = asyncio.create_task(playing.run({}, extra_info={"aenv": {"task": {"id": "go"}}}))
    await begun.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert abandoned.is_set()
    await asyncio.to_thread(shared_pool(CORRIDOR, **options).close)


async def test_an_image_of_a_tool_is_one_for_a_model_that_sees(manager: Any) -> None:
    del manager
    playing = object.__new__(AenvAgentLoop)
    with EpisodePool(AGENT_TOOLS) as pool:
        episode = await pool.begin({"reward": None})
        tools = EnvironmentTools(episode)
        await tools.load()
        playing.processor = object()
        drawn = await playing._call(tools, "draw")
        assert [image.size for image in drawn.image] == [(1, 1)]
        playing.processor = None
        assert (await playing._call(tools, "draw")).text == "[image: image/png]"
        await episode.finish()


PROGRAM = """
import sys, threading
from pathlib import Path
from tests.heavy.test_verl import BEGUN, _batch, made_manager

def tell():
    while not Path(sys.argv[1], BEGUN).exists():
        threading.Event().wait(0.1)
    print("begun")

threading.Thread(target=tell).start()
made_manager(sys.argv[1]).generate_sequences(_batch("Stay."))
"""


def test_a_killed_trainer_leaves_no_instance(model: str, installed: str, tmp_path: Path) -> None:
    """Its pools are those of verl's workers, which end with the Ray job of the trainer."""
    del installed
    kill_once_it_acts(PROGRAM, model, directory=tmp_path)
