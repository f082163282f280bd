"""Train PPO of Stable-Baselines3 on eight instances.

pip install 'aenv-ray[stable-baselines3]'
python examples/integrations/trainers/train_stable_baselines3.py PROJECT [STEPS]
"""

import sys

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.stable_baselines3 import ToolVecEnv


def main(environment: str, steps: int = 4096) -> None:
    observations = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    with EpisodePool(environment) as pool:
        env = ToolVecEnv(pool, {}, 8, observations, gymnasium.spaces.Discrete(2))
        model = PPO("MlpPolicy", VecMonitor(env), n_steps=32, batch_size=64, ent_coef=0.01)
        model.learn(steps)
        print("steps", model.num_timesteps)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
