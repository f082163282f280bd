"""AReaL's own classes and checks, with a scripted inference engine: its engines need CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from areal.api import ModelRequest, ModelResponse
from areal.api.cli_args import GenerationHyperparameters
from areal.infra import check_trajectory_format

import aenv_ray
from aenv_ray.integrations.areal import AenvAgent, AenvWorkflow, VoidEpisode
from aenv_ray.integrations.episodes import shared_pool
from tests.emulators.model_endpoint import completion, serving, tool_call
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.heavy.conftest import CORRIDOR
from tests.unit.integrations.fakes import END, LetterTokenizer

FORWARDS = '<tool_call>{"name": "step", "arguments": {"action": 1}}</tool_call>'
ROW = {"messages": [{"role": "user", "content": "Walk."}], "aenv": {"id": "walk", "seed": 3}}


class Engine:
    """Answers as AReaL's engines do, by newer weights each time; "lose" ends the sandboxes."""

    def __init__(self, *texts: str) -> None:
        self.left = list(texts)
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.left.pop(0)
        if text == "lose":
            await _lose()
            text = FORWARDS + END
        written = [ord(letter) for letter in text]
        return ModelResponse(
            input_tokens=request.input_ids, output_tokens=written,
            output_logprobs=[-0.5] * len(written), tokenizer=request.tokenizer,
            output_versions=[len(self.requests)] * len(written),
        )  # fmt: skip


async def _lose() -> None:
    for info in aenv_ray.list_instances():
        await aenv_ray.get(info.id).release.remote()


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    shared_pool(str(CORRIDOR)).close()


def workflow() -> AenvWorkflow:
    generation = GenerationHyperparameters(max_new_tokens=2000)
    return AenvWorkflow(str(CORRIDOR), generation, LetterTokenizer(), void_retries=0)


async def test_a_trajectory_passes_areals_own_check() -> None:
    engine = Engine(FORWARDS + END, "I have arrived." + END)
    found = await workflow().arun_episode(engine, ROW)
    assert check_trajectory_format(found)
    assert found is not None
    assert found["rewards"].tolist() == [1.0]
    written = found["input_ids"][found["loss_mask"] == 1].tolist()
    assert LetterTokenizer().decode(written) == f"{FORWARDS}{END}I have arrived.{END}"
    assert set(found["versions"][found["loss_mask"] == 1].tolist()) == {1, 2}
    first, second = engine.requests
    assert ord(END) in first.gconfig.stop_token_ids
    assert (first.gconfig.max_new_tokens, second.gconfig.max_new_tokens < 2000) == (2000, True)


async def test_a_lost_sandbox_rejects_its_trajectory_and_no_other() -> None:
    assert await workflow().arun_episode(Engine("lose"), ROW) is None
    found = await workflow().arun_episode(Engine("I stay." + END), ROW)
    assert check_trajectory_format(found)


async def test_an_agent_plays_by_the_client_of_openai() -> None:
    call = completion(None, tool_call("step", {"action": 1}))
    with serving(call, completion("I have arrived.")) as model:
        reward = await AenvAgent(str(CORRIDOR)).run(ROW, base_url=model.url, api_key="k")
    assert (type(reward), reward) == (float, 1.0)
    assert '"terminated":true' in model.requests[1]["messages"][-1]["content"]

    def lose(handler: Any) -> None:
        import ray

        ray.get([aenv_ray.get(one.id).release.remote() for one in aenv_ray.list_instances()])
        call(handler)

    with serving(lose) as model, pytest.raises(VoidEpisode, match="'walk' is void"):
        await AenvAgent(str(CORRIDOR)).run(ROW, base_url=model.url, api_key="k")


PROGRAM = """
import asyncio
from tests.heavy.test_areal import ROW, Engine, FORWARDS, END, workflow

class Endless(Engine):
    async def agenerate(self, request):
        if self.requests:
            print("begun")
            await asyncio.Event().wait()
        return await super().agenerate(request)

asyncio.run(workflow().arun_episode(Endless(FORWARDS + END), ROW))
"""


def test_a_killed_trainer_leaves_no_instance(tmp_path: Path) -> None:
    kill_once_it_acts(PROGRAM, directory=tmp_path)
