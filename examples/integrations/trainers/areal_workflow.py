"""Train with AReaL on an environment, with tokens of its own engine.

pip install 'aenv-ray[areal]'
A row of the dataset has `messages`, and the task of the episode under `aenv`.
"""

from typing import Any

WORKFLOW = "aenv_ray.integrations.areal.AenvWorkflow"


def train(trainer: Any, config: Any, environment: str) -> None:
    trainer.train(
        workflow=WORKFLOW,
        workflow_kwargs={
            "environment": environment,
            "gconfig": config.gconfig,
            "tokenizer": config.tokenizer_path,
            "max_turns": 16,
            "out": "episodes",
        },
    )
