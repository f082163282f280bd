"""A resources server of NeMo Gym, ``app.py``, whose sessions play an environment.

pip install 'aenv-ray[nemo-gym]'
"""

from typing import Any

from aenv_ray.integrations.nemo_gym import AenvResourcesServer, response_tools
from aenv_ray.sampling import environment_tasks


class TerminalServer(AenvResourcesServer):
    """Its configuration names the environment: ``environment: mini-terminal``."""


def rows(environment: str) -> list[dict[str, Any]]:
    """Return the rows of a dataset; write them as JSON Lines."""
    tools = response_tools(environment)
    return [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": task.instruction}],
                "tools": tools,
            },
            "verifier_metadata": {"aenv": task.model_dump(mode="json", exclude_defaults=True)},
        }
        for task in environment_tasks(environment)
    ]


if __name__ == "__main__":
    TerminalServer.run_webserver()
