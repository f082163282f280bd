"""Rows of a data set for NeMo RL, and the environment that they are played on.

from aenv_ray.sampling import environment_tasks
from nemo_rl_rows import register, rows

register()  # before the trainer reads its configuration, which has
            # env: {aenv: {environment: mini-terminal, max_turns: 16}}
data = rows("mini-terminal", environment_tasks("mini-terminal"))
"""

from typing import Any

from nemo_rl.environments.utils import register_env

from aenv_ray.integrations import nemo_rl
from aenv_ray.sampling import Task


def register() -> None:
    register_env("aenv", "aenv_ray.integrations.nemo_rl.AenvEnvironment")


def rows(environment: str, tasks: list[Task]) -> list[dict[str, Any]]:
    """Return a row for each task; the prompt says how the tools are called."""
    tools = nemo_rl.instructions(environment)
    return [
        {
            "task_name": "aenv",
            "message_log": [
                {"role": "system", "content": tools},
                {"role": "user", "content": task.instruction},
            ],
            "extra_env_info": {nemo_rl.ROW: task.model_dump(mode="json", exclude_defaults=True)},
            "loss_multiplier": 1.0,
        }
        for task in tasks
    ]
