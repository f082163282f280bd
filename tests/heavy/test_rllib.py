"""RLlib runs an iteration; its env runner is an actor with a pool of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune import register_env

import aenv_ray
from aenv_ray.integrations import rllib
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.heavy.conftest import CORRIDOR
from tests.heavy.test_examples import EXAMPLES

OBSERVATIONS = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)


def _algorithm() -> Any:
    aenv_ray.init()
    register_env("corridor", rllib.creator(str(CORRIDOR), {}, OBSERVATIONS, ACTIONS))
    config = (
        PPOConfig()
        .environment("corridor")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2, rollout_fragment_length=32)
        .training(train_batch_size=64, minibatch_size=32, num_epochs=1)
        .evaluation(evaluation_interval=None)
    )
    return config.build_algo()


def test_one_iteration_of_ppo() -> None:
    algorithm = _algorithm()
    try:
        result = algorithm.train()
    finally:
        algorithm.stop()
    assert result["env_runners"]["num_env_steps_sampled"] >= 64
    assert result["env_runners"]["num_episodes"] > 0


def test_a_lost_sandbox_is_truncated_and_the_iteration_goes_on() -> None:
    env = rllib.creator(str(CORRIDOR), {}, OBSERVATIONS, ACTIONS)({})
    env.reset(seed=1)
    ray.get(aenv_ray.get(env.seat.instance_id).release.remote())
    _, reward, terminated, truncated, info = env.step(1)
    assert (reward, terminated, truncated, info["void"]) == (0.0, False, True, True)
    env.close()
    algorithm = _algorithm()
    try:
        algorithm.train()
        lost = aenv_ray.list_instances()
        ray.get([aenv_ray.get(one.id).release.remote() for one in lost])
        result = algorithm.train()
        assert len(lost) >= 2
        assert result["env_runners"]["num_env_steps_sampled"] >= 64
        assert result["num_training_step_calls_per_iteration"] == 1
        assert algorithm.env_runner_group.num_remote_worker_restarts() == 0
    finally:
        algorithm.stop()


def test_a_killed_training_leaves_no_instance(tmp_path: Path) -> None:
    example = EXAMPLES / "train_rllib.py"
    kill_once_it_acts(example, str(CORRIDOR), "100000", directory=tmp_path)
