"""An agent of Pydantic AI acts in an environment.

pip install 'aenv-ray[pydantic-ai]'
python examples/integrations/agents/pydantic_ai_agent.py mini-terminal MODEL "Count the files."
"""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models import Model

from aenv_ray import Environment
from aenv_ray.integrations.pydantic_ai import EnvironmentToolset


async def main(environment: str, model: str | Model, task: str) -> None:
    async with Environment(environment) as env:
        result = await Agent(model, toolsets=[EnvironmentToolset(env)]).run(task)
        print(result.output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
