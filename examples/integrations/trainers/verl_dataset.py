"""Write a dataset whose rows verl plays in mini-terminal.

pip install 'aenv-ray[verl]'
python examples/integrations/trainers/verl_dataset.py train.parquet
python -m verl.trainer.main_ppo data.train_files=train.parquet data.return_raw_chat=true \\
    algorithm.adv_estimator=grpo_without_void actor_rollout_ref.rollout.multi_turn.format=hermes …
"""

import sys

import pandas as pd

from aenv_ray.sampling import environment_tasks

ENVIRONMENT = "mini-terminal"


def rows() -> list[dict]:
    tasks = environment_tasks(ENVIRONMENT)
    return [
        {
            "data_source": ENVIRONMENT,
            "agent_name": "aenv",  # the agent loop
            "prompt": [{"role": "user", "content": task.instruction}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {
                "index": place,
                "aenv": {
                    "environment": ENVIRONMENT,
                    "task": task.model_dump(mode="json", exclude_defaults=True),
                },
            },
        }
        for place, task in enumerate(tasks)
    ]


def main(path: str) -> None:
    table = pd.DataFrame(rows())
    table.to_parquet(path)
    print("rows", len(table))


if __name__ == "__main__":
    main(sys.argv[1])
