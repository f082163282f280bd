"""A taskset of verifiers as an environment: its tools, its tasks and its rewards."""

import asyncio
import base64
import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from relay_harness import MODEL, SEAT, Ended
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from aenv_ray.runtime import (
    Image,
    register_function,
    register_reward,
    register_tasks,
    register_tool,
)

GIVEN: dict[str, Any] = json.loads(Path(__file__).with_name("taskset.json").read_text())
EPISODE_S = 3600.0
ANSWER = (
    "Say something: your answer to the task, or a message to the user. Returns what the user "
    "says, or that the task has ended."
)

# verifiers starts the servers of tools as programs of their own, which import the same modules.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])


def environment() -> tuple[vf.Env, str]:
    """Return verifiers' environment, and which of its agents the caller is."""
    config = resolve_env_config(GIVEN["env"])
    agents = list(agent_config_fields(config))
    name = GIVEN["agent"] or (agents[0] if len(agents) == 1 else "")
    if name not in agents:
        raise ValueError(f"name the agent that the caller is: one of {', '.join(agents)}")
    given = getattr(config, name).model_dump(exclude_unset=True)
    seat = {**given, "harness": {"id": "relay_harness"}, "runtime": {"type": "subprocess"}}
    config = type(config).model_validate({**config.model_dump(), name: seat})
    return load_environment(config), name


ENV, AGENT = environment()


def offered() -> list[Any]:
    """Return the tools of the taskset, under the names that a model sees."""
    task_type, taskset = type(ENV.taskset).task_type(), ENV.taskset
    found = []
    for toolset in [
        *task_type.toolsets(taskset.config.task),
        *type(taskset).toolsets(taskset.config),
    ]:
        server = MCPServer(toolset.server_name or "tools")
        toolset.register(server)
        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop
            listed = thread.submit(lambda: asyncio.run(server.list_tools())).result()  # noqa: B023
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        found += [tool.model_copy(update={"name": f"{prefix}{tool.name}"}) for tool in listed]
    return found


def offer(name: str, description: str, schema: dict[str, Any]) -> None:
    """Register a tool of the taskset."""

    @register_tool(name=name, description=description or name, input_schema=schema)
    async def call(**arguments: Any) -> Any:
        content = await SEAT.call(name, arguments)
        return content if isinstance(content, str) else [_shown(part) for part in content]


def _shown(part: dict[str, Any]) -> Any:
    if part["type"] != "image_url":
        return part["text"]
    kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return Image(base64.b64decode(data), kind)


for one in offered():
    offer(one.name, one.description or "", one.input_schema)


@register_tool(description=ANSWER)
async def answer(text: str) -> str:
    """Say something.

    Args:
        text: The whole answer or message.
    """
    try:
        return await SEAT.say(text)
    except Ended as ended:
        return str(ended)


@register_tasks
def tasks() -> Iterator[dict[str, Any]]:
    """List the tasks."""
    count = None if ENV.taskset.bounded else GIVEN["task_count"]
    for index, task in enumerate(itertools.islice(ENV.taskset, count)):
        parts = (task.data.system_prompt, task.data.prompt_text)
        yield {
            "id": str(task.data.id or task.data.name or index),
            "instruction": "\n\n".join(part for part in parts if part),
            "setup": {"function": "begin", "arguments": {"index": index}},
        }


@register_function(timeout=EPISODE_S)
async def begin(index: int) -> list[dict[str, Any]]:
    """Begin the episode of a task; return the messages that open it."""
    if SEAT.episode is not None:
        raise RuntimeError("this instance has an episode; create another for the next one")
    task = next(itertools.islice(ENV.taskset, index, None), None)
    if task is None:
        raise ValueError(f"the taskset has no task {index}")
    return await SEAT.begin(asyncio.get_running_loop().create_task(play(task)))


async def play(task: vf.Task) -> vf.Episode:
    """Play an episode of verifiers, whose agent is the caller."""
    async with SEAT.model() as url, ENV.serving():
        client = vf.EvalClientConfig(base_url=url, api_key_var="AENV_NO_KEY")
        return await ENV.run_episode(task, vf.ModelContext(model=MODEL, client=client))


@register_reward
async def verifiers_reward() -> dict[str, Any]:
    """End the episode; return its reward, and what verifiers says of it."""
    episode = await SEAT.leave()
    traces = [t for t in episode.traces if t.agent.name in (AGENT, None)]
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors or not traces:
        words = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no trace"
        raise RuntimeError(f"verifiers did not score the episode: {words}")
    trace = traces[-1]
    rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
    return {
        "reward": trace.reward,
        "rewards": rewards,
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
    }


@register_function
async def conversation() -> list[dict[str, Any]]:
    """Return the messages of the finished episode, as verifiers recorded them."""
    episode = await SEAT.leave()
    return [message_to_wire(one) for trace in episode.traces for one in trace.messages]
