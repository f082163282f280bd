"""Play in an image of OpenEnv that runs as an instance of the docker engine.

pip install 'aenv-ray[openenv]'
python examples/integrations/trainers/openenv_container.py IMAGE
"""

import asyncio
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from aenv_ray.integrations.openenv_containers import COMMAND, InstanceProvider


async def main(image: str, command: str = COMMAND, action: dict[str, Any] | None = None) -> None:
    provider = InstanceProvider(command)
    client = await GenericEnvClient.from_docker_image(image, provider=provider)
    async with client as env:
        await env.reset()
        result = await env.step(action or {"message": "hello"})
        print("reward", result.reward)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
