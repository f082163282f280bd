"""OpenRLHF's own base class, with scripted answers of vLLM: training needs CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openrlhf.utils.agent import AgentExecutorBase

import aenv_ray
from aenv_ray.integrations.episodes import shared_pool
from aenv_ray.integrations.openrlhf import agent_executor
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.heavy.conftest import CORRIDOR
from tests.heavy.test_examples import EXAMPLES
from tests.unit.integrations.fakes import END, LetterTokenizer

FORWARDS = '<tool_call>{"name": "step", "arguments": {"action": 1}}</tool_call>'
LABEL = '{"id": "walk", "seed": 3}'


class Engine:
    """Answers as vLLM does, with one text after the other; "lose" ends the sandboxes."""

    def __init__(self, *texts: str) -> None:
        self.left = list(texts)

    async def generate(self, ids: list[int], params: Any, multi_modal_data: Any) -> Any:
        del ids, params, multi_modal_data
        text = self.left.pop(0)
        if text == "lose":
            for info in aenv_ray.list_instances():
                await aenv_ray.get(info.id).release.remote()
            text = FORWARDS + END
        written = [ord(letter) for letter in text]
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in written]
        answer = SimpleNamespace(token_ids=written, logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(outputs=[answer])


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    shared_pool(str(CORRIDOR)).close()


async def executed(*texts: str) -> dict[str, Any]:
    executor = agent_executor(str(CORRIDOR), void_retries=0)()
    params = SimpleNamespace(max_tokens=None, logprobs=1)
    tokenizer = LetterTokenizer()
    return await executor.execute("Walk.", LABEL, params, 4000, tokenizer, Engine(*texts))


async def test_an_episode_is_played_and_a_lost_one_has_no_action() -> None:
    found = await executed(FORWARDS + END, "I have arrived." + END)
    assert (found["reward"], found["extra_logs"]) == (1.0, {"aenv_void": 0.0})
    text = LetterTokenizer().decode(found["observation_tokens"])
    written = [text[start:end] for start, end in found["action_ranges"]]
    assert written == [FORWARDS + END, "I have arrived." + END]
    lost = await executed("lose")
    assert (lost["action_ranges"], lost["extra_logs"]) == ([], {"aenv_void": 1.0})
    again = await executed("I stay." + END)
    assert (again["reward"], again["extra_logs"]) == (0.0, {"aenv_void": 0.0})


def test_the_example_is_loaded_as_openrlhf_loads_it() -> None:
    spec = importlib.util.spec_from_file_location("agent_module", EXAMPLES / "openrlhf_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.AgentExecutor, AgentExecutorBase)
    assert isinstance(module.AgentExecutor(), AgentExecutorBase)


PROGRAM = """
import asyncio
from tests.heavy import test_openrlhf
from tests.heavy.test_openrlhf import FORWARDS, END, Engine, executed

class Endless(Engine):
    async def generate(self, *given, **options):
        if not self.left:
            print("begun")
            await asyncio.Event().wait()
        return await super().generate(*given, **options)

test_openrlhf.Engine = Endless
asyncio.run(executed(FORWARDS + END))
"""


def test_a_killed_trainer_leaves_no_instance(tmp_path: Path) -> None:
    kill_once_it_acts(PROGRAM, directory=tmp_path)
