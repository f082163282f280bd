"""Train PPO of RLlib for some iterations.

pip install 'aenv-ray[rllib]' torch
python examples/integrations/trainers/train_rllib.py PROJECT [ITERATIONS]
"""

import sys

import gymnasium
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune import register_env

import aenv_ray
from aenv_ray.integrations import rllib


def main(environment: str, iterations: int = 10) -> None:
    aenv_ray.init()
    observations = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    actions = gymnasium.spaces.Discrete(2)
    register_env("walk", rllib.creator(environment, {}, observations, actions))
    config = PPOConfig().environment("walk")
    config = config.env_runners(
        num_env_runners=1, num_envs_per_env_runner=2, rollout_fragment_length=32
    )
    algorithm = config.training(train_batch_size=64, minibatch_size=32, num_epochs=1).build_algo()
    for _ in range(iterations):
        result = algorithm.train()
        print("episodes", result["env_runners"]["num_episodes"])
    algorithm.stop()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
