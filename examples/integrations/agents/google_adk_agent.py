"""An agent of Google's Agent Development Kit acts in an environment.

pip install 'aenv-ray[google-adk]'
python examples/integrations/agents/google_adk_agent.py mini-terminal MODEL "Count the files."
"""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from aenv_ray import Environment
from aenv_ray.integrations.google_adk import EnvironmentToolset


async def main(environment: str, model: str | BaseLlm, task: str) -> None:
    async with Environment(environment) as env:
        runner = InMemoryRunner(
            LlmAgent(name="worker", model=model, tools=[EnvironmentToolset(env)])
        )
        session = await runner.session_service.create_session(
            app_name=runner.app_name, user_id="user"
        )
        message = types.Content(role="user", parts=[types.Part(text=task)])
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message
        ):
            if event.is_final_response() and event.content is not None:
                print(event.content.parts[0].text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
