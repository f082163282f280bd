"""Serve an environment to the clients of OpenEnv.

pip install 'aenv-ray[openenv]'
python examples/integrations/trainers/openenv_server.py mini-terminal 8000
"""

import sys

import uvicorn

from aenv_ray.integrations.openenv import application


def main(environment: str, port: str) -> None:
    uvicorn.run(application(environment), host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:3])
