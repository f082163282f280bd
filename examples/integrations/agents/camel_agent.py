"""An agent of CAMEL acts in an environment.

pip install camel-ai 'mcp<2', and aenv-ray as docs/integrations.md says
From a program: await main("mini-terminal", ModelFactory.create(…), "Count the files in /etc.")
"""

from camel.agents import ChatAgent
from camel.models import BaseModelBackend

from aenv_ray import Environment
from aenv_ray.integrations.camel import environment_toolkit


async def main(environment: str, model: BaseModelBackend, task: str) -> None:
    async with Environment(environment) as env:
        toolkit = await environment_toolkit(env)
        agent = ChatAgent("You solve tasks.", model=model, tools=toolkit.get_tools())
        response = await agent.astep(task)
        toolkit.check()
        print(response.msgs[0].content)
