"""Evaluate a model on an environment with verifiers.

pip install 'aenv-ray[verifiers]'
python examples/integrations/trainers/verifiers_environment.py PROJECT MODEL http://127.0.0.1:8000/v1
"""

import asyncio
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from aenv_ray.integrations.verifiers import AenvEnv, AenvTaskset

__all__ = ["AenvEnv", "AenvTaskset"]  # this file is a taskset of verifiers


async def main(environment: str, model: str, url: str) -> None:
    taskset = {
        "id": "verifiers_environment",
        "environment": environment,
        "tasks": [{"id": "walk", "instruction": "Walk to the goal.", "seed": 3}],
    }
    env = load_environment(resolve_env_config({"taskset": taskset}))
    context = vf.ModelContext(model=model, client=vf.EvalClientConfig(base_url=url))
    async with env.serving():
        for task in env.taskset:
            episode = await env.run_episode(task, context)
            print(task.key, episode.ok, [trace.reward for trace in episode.traces])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
