"""RLlib runs an iteration; its env runner is an actor with a pool of its own."""

from __future__ import annotations

import gymnasium
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune import register_env

import aenv_ray
from aenv_ray.integrations import rllib
from tests.heavy.conftest import CORRIDOR

OBSERVATIONS = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)


def test_one_iteration_of_ppo() -> None:
    aenv_ray.init()
    register_env("corridor", rllib.creator(str(CORRIDOR), {}, OBSERVATIONS, ACTIONS))
    config = (
        PPOConfig()
        .environment("corridor")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2, rollout_fragment_length=32)
        .training(train_batch_size=64, minibatch_size=32, num_epochs=1)
        .evaluation(evaluation_interval=None)
    )
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
    finally:
        algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled"] >= 64
    assert result["env_runners"]["num_episodes"] > 0
