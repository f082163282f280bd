"""A loop over OpenAI's chat completions acts in an environment.

pip install aenv-ray openai
python examples/integrations/agents/openai_chat.py mini-terminal MODEL "Count the files."
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI

from aenv_ray import Environment
from aenv_ray.integrations.openai import OpenAITools


async def main(environment: str, model: str, task: str, client: Any = None) -> None:
    client = client or AsyncOpenAI()
    messages: list[Any] = [{"role": "user", "content": task}]
    async with Environment(environment) as env:
        tools = OpenAITools(env)
        offered = await tools.chat_tools()
        while True:
            completion = await client.chat.completions.create(
                model=model, messages=messages, tools=offered
            )
            answer = completion.choices[0].message
            if not answer.tool_calls:
                break
            messages += [answer, *await tools.answer_chat(answer)]
    print(answer.content)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
