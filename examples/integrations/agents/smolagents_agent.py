"""An agent of smolagents acts in an environment.

pip install 'aenv-ray[smolagents]'
From a program: main("mini-terminal", LiteLLMModel(…), "Count the files in /etc.")
"""

from smolagents import ToolCallingAgent
from smolagents.models import Model

from aenv_ray import SyncEnvironment
from aenv_ray.integrations.smolagents import end_if_void, tools


def main(environment: str, model: Model, task: str) -> None:
    with SyncEnvironment(environment) as env:
        agent = ToolCallingAgent(
            tools=tools(env), model=model, step_callbacks=[end_if_void], verbosity_level=0
        )
        print(agent.run(task))
    env.close()
