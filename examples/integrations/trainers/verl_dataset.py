"""Write a dataset whose rows verl plays in mini-terminal.

pip install 'aenv-ray[verl]'
python examples/integrations/trainers/verl_dataset.py train.parquet
python -m verl.trainer.main_ppo data.train_files=train.parquet data.return_raw_chat=true \\
    algorithm.adv_estimator=grpo_without_void actor_rollout_ref.rollout.multi_turn.format=hermes …
"""

import sys

import pandas as pd

ENVIRONMENT = "mini-terminal"
TASKS = [{"id": "count", "instruction": "Count the files in /etc."}]


def rows() -> list[dict]:
    return [
        {
            "data_source": ENVIRONMENT,
            "agent_name": "aenv",  # the agent loop
            "prompt": [{"role": "user", "content": task["instruction"]}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": place, "aenv": {"environment": ENVIRONMENT, "task": task}},
        }
        for place, task in enumerate(TASKS)
    ]


def main(path: str) -> None:
    pd.DataFrame(rows()).to_parquet(path)
    print("rows", len(TASKS))


if __name__ == "__main__":
    main(sys.argv[1])
