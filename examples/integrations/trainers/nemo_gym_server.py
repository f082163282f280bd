"""A resources server of NeMo Gym, ``app.py``, whose sessions play an environment.

pip install 'aenv-ray[nemo-gym]'
"""

from typing import Any

from aenv_ray.integrations.nemo_gym import AenvResourcesServer, response_tools


class TerminalServer(AenvResourcesServer):
    """Its configuration names the environment: ``environment: mini-terminal``."""


def rows(environment: str) -> list[dict[str, Any]]:
    """Return the rows of a dataset; write them as JSON Lines."""
    task = {"id": "count", "instruction": "Count the files in /etc."}
    prompt = [{"role": "user", "content": task["instruction"]}]
    params = {"input": prompt, "tools": response_tools(environment)}
    return [{"responses_create_params": params, "verifier_metadata": {"aenv": task}}]


if __name__ == "__main__":
    TerminalServer.run_webserver()
