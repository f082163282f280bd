"""Stable-Baselines3 learns the corridor."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import ray
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import aenv_ray
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.stable_baselines3 import ToolVecEnv
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.heavy.conftest import CORRIDOR
from tests.heavy.test_examples import EXAMPLES

OBSERVATIONS = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)
REWARD = 0.69
"""A walk from the first field to the goal has 1.0 - 3 * 0.1."""


def test_ppo_learns_to_walk_to_the_goal(pool: EpisodePool) -> None:
    env = ToolVecEnv(pool, {}, 4, OBSERVATIONS, ACTIONS)
    model = PPO(
        "MlpPolicy", env, n_steps=64, batch_size=64, learning_rate=0.003, ent_coef=0.01, seed=1
    )
    before, _ = evaluate_policy(model, env, n_eval_episodes=4, warn=False)
    model.learn(1536)
    after, _ = evaluate_policy(model, env, n_eval_episodes=4, warn=False)
    assert before < REWARD <= after
    env.close()


def test_a_lost_sandbox_is_truncated_and_learning_goes_on(pool: EpisodePool) -> None:
    env = ToolVecEnv(pool, {}, 2, OBSERVATIONS, ACTIONS)
    env.reset()
    ray.get(aenv_ray.get(env.envs[0].seat.instance_id).release.remote())
    _, rewards, dones, infos = env.step(np.array([1, 1]))
    assert (list(rewards), list(dones)) == ([0.0, np.float32(-0.1)], [True, False])
    assert infos[0]["void"]
    assert infos[0]["TimeLimit.truncated"]
    assert infos[0]["terminal_observation"].argmax() == 0
    PPO("MlpPolicy", env, n_steps=8, batch_size=16, n_epochs=1).learn(16)
    env.close()


def test_a_killed_training_leaves_no_instance(tmp_path: Path) -> None:
    example = EXAMPLES / "train_stable_baselines3.py"
    kill_once_it_acts(example, str(CORRIDOR), "1000000", directory=tmp_path)
