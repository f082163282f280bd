"""Functions for SLIME: the model acts on mini-terminal.

    --custom-generate-function-path slime_rollouts.custom_generate
    --custom-reward-post-process-path aenv_ray.integrations.slime.post_process_rewards

A row of the prompt data has the task under ``metadata``: ``{"aenv": {"id": …, "setup": …}}``.
"""

from aenv_ray.integrations.slime import rollouts

custom_generate = rollouts("mini-terminal", max_turns=16, out="episodes.jsonl")
