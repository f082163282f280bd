"""Train a model that calls tools with GRPO of TRL.

pip install 'aenv-ray[trl]'
python examples/integrations/trainers/train_trl.py MODEL [ENVIRONMENT] [STEPS]
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.trl import Environments
from aenv_ray.sampling import environment_tasks


def main(model: str, environment: str = "mini-terminal", steps: str = "100") -> None:
    tasks = {task.id: task for task in environment_tasks(environment)}
    rows = [
        {"prompt": [{"role": "user", "content": task.instruction}], "id": task.id}
        for task in tasks.values()
    ]
    with EpisodePool(environment) as pool:
        environments = Environments(pool, task=lambda row: tasks[row["id"]])
        trainer = GRPOTrainer(
            model,
            args=GRPOConfig(
                num_generations=4,
                per_device_train_batch_size=4,
                max_steps=int(steps),
                bf16=torch.cuda.is_available(),
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Dataset.from_list(rows),
            environment_factory=environments,
            callbacks=[environments.callback()],
        )
        trainer.train()
        print("trained", trainer.state.global_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
