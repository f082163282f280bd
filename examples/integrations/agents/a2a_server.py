"""Serve an agent to clients that speak A2A.

pip install 'aenv-ray[a2a]'
python examples/integrations/agents/a2a_server.py examples/chat-agent 9000
"""

import sys

import uvicorn

import aenv_ray
from aenv_ray.integrations.a2a import application


def main(project: str, port: str) -> None:
    env = aenv_ray.create(project)
    served = application(env, url=f"http://127.0.0.1:{port}")
    uvicorn.run(served, host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:3])
