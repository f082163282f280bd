"""An agent of the OpenAI Agents SDK acts in an environment.

pip install 'aenv-ray[openai-agents]'
python examples/integrations/agents/openai_agents_sdk.py mini-terminal MODEL "Count the files."
"""

import asyncio
import sys

from agents import Agent, Runner
from agents.models.interface import Model

from aenv_ray import Environment
from aenv_ray.integrations.openai_agents import EnvironmentServer


async def main(environment: str, model: str | Model, task: str) -> None:
    async with Environment(environment) as env:
        agent = Agent("worker", model=model, mcp_servers=[EnvironmentServer(env)])
        result = await Runner.run(agent, task)
        print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
