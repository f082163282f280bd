"""AutoGen calls the tools of an environment by a workbench; give it to an AssistantAgent.

pip install 'aenv-ray[autogen]'
python examples/integrations/agents/autogen_workbench.py mini-terminal execute_command '{…}'
"""

import asyncio
import json
import sys

from aenv_ray import Environment
from aenv_ray.integrations.autogen import EnvironmentWorkbench


async def main(environment: str, tool: str, arguments: str) -> None:
    async with Environment(environment) as env, EnvironmentWorkbench(env) as workbench:
        print("tools", [offered["name"] for offered in await workbench.list_tools()])
        result = await workbench.call_tool(tool, json.loads(arguments))
        print(result.to_text())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
