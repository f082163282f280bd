"""Policies without a model: one plays the reference solution, one does nothing, one acts randomly.

They check a set of tasks: the reference must earn the full reward, the others must not.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.errors import ConfigError, ToolError
from aenv_ray.sampling.episode_env import CALL_TIMEOUT_S, EpisodeEnv
from aenv_ray.sampling.tasks.archives import packed
from aenv_ray.trajectories.schema import Task

RANDOM_CALLS: Final = 8
"""Tool calls of an episode of `RandomPolicy`."""
_DEEPEST: Final = 4
"""Arguments nested more deeply than this are left out where the schema allows."""


async def reference(env: EpisodeEnv, task: Task) -> str:
    """Play the reference solution of the task.

    Raises:
        ConfigError: The task has none.
        ToolError: A call was refused.
    """
    if not task.reference:
        raise ConfigError(
            f"task {task.id!r} has no reference solution",
            hint='add "reference": [{"tool": …, "arguments": {…}}] to the task',
        )
    for call in task.reference:
        await env.call_tool(call.tool, await packed(call), call.timeout_s or CALL_TIMEOUT_S)
    return "reference"


async def null(env: EpisodeEnv, task: Task) -> str:
    """Do nothing, so that the reward judges the untouched environment."""
    del env, task
    return "null"


class RandomPolicy:
    """Calls random tools with random arguments that match their schemas.

    Args:
        seed: The same seed makes the same calls for the same task, in any order of episodes.
        calls: Tool calls of an episode.
    """

    def __init__(self, seed: int = 0, calls: int = RANDOM_CALLS) -> None:
        self.name = f"random:{seed}"
        """Its name in records."""
        self.seed = seed
        self.calls = calls

    def __repr__(self) -> str:
        return f"RandomPolicy(seed={self.seed}, calls={self.calls})"

    async def __call__(self, env: EpisodeEnv, task: Task) -> str:
        """Play an episode."""
        chance = random.Random(f"{self.seed}:{task.id}")
        tools = sorted(await env.list_tools(), key=lambda tool: str(tool["name"]))
        for _ in range(self.calls if tools else 0):
            tool = chance.choice(tools)
            try:
                await env.call_tool(tool["name"], random_value(tool["inputSchema"], chance))
            except ToolError:
                continue  # it is in the record; random arguments may well be refused
        return "random"


def random_value(schema: Mapping[str, Any], chance: random.Random, depth: int = 0) -> Any:
    """Return a random value for a JSON Schema, as far as its types, choices and bounds say."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return chance.choice(schema["enum"])
    for choice in ("anyOf", "oneOf"):
        if schema.get(choice):
            return random_value(chance.choice(schema[choice]), chance, depth)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = chance.choice(kind)
    if kind == "object":
        return _random_object(schema, chance, depth)
    if kind == "array":
        count = 0 if depth >= _DEEPEST else chance.randint(0, 3)
        count = max(count, schema.get("minItems", 0))
        return [random_value(schema.get("items", {}), chance, depth + 1) for _ in range(count)]
    return _random_scalar(kind, schema, chance)


def _random_object(schema: Mapping[str, Any], chance: random.Random, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    return {
        name: random_value(field, chance, depth + 1)
        for name, field in schema.get("properties", {}).items()
        if name in required or (depth < _DEEPEST and chance.random() < 0.5)
    }


def _random_scalar(kind: str, schema: Mapping[str, Any], chance: random.Random) -> Any:
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = max(low, schema.get("maximum", schema.get("exclusiveMaximum", low + 100)))
    match kind:
        case "integer":
            return chance.randint(int(low), int(high))
        case "number":
            return chance.uniform(low, high)
        case "boolean":
            return chance.random() < 0.5
        case "null":
            return None
        case _:
            letters = string.ascii_lowercase + string.digits + " "
            length = max(chance.randint(1, 16), schema.get("minLength", 0))
            return "".join(chance.choices(letters, k=min(length, schema.get("maxLength", length))))
