"""A loop over Anthropic's messages acts in an environment.

pip install aenv-ray anthropic
python examples/integrations/agents/anthropic_messages.py mini-terminal MODEL "Count the files."
"""

import asyncio
import sys
from typing import Any

from anthropic import AsyncAnthropic

from aenv_ray import Environment
from aenv_ray.integrations.anthropic import AnthropicTools


async def main(environment: str, model: str, task: str, client: Any = None) -> None:
    client = client or AsyncAnthropic()
    messages: list[Any] = [{"role": "user", "content": task}]
    async with Environment(environment) as env:
        tools = AnthropicTools(env)
        offered = await tools.tools()
        while True:
            answer = await client.messages.create(
                model=model, messages=messages, tools=offered, max_tokens=2000
            )
            results = await tools.answer(answer.content)
            if not results:
                break
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results},
            ]
    print(answer.content[-1].text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
