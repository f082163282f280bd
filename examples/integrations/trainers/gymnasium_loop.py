"""Step an environment as one of Gymnasium, and three at once.

pip install 'aenv-ray[gymnasium]'
python examples/integrations/trainers/gymnasium_loop.py PROJECT
"""

import sys

import gymnasium
import numpy as np

from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.gymnasium import ToolEnv, VectorToolEnv


def main(environment: str) -> None:
    observations = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    actions = gymnasium.spaces.Discrete(2)
    with EpisodePool(environment) as pool:
        env = ToolEnv(pool, {}, observations, actions)
        env.reset(seed=0)
        ended, rewards = False, []
        while not ended:
            _, reward, terminated, truncated, info = env.step(1)
            rewards.append(reward)
            ended = terminated or truncated
        print("rewards", rewards, "void", info["void"])

        envs = VectorToolEnv(pool, {}, 3, observations, actions)
        envs.reset(seed=0)
        print("vector", envs.step(np.array([1, 1, 1]))[1])


if __name__ == "__main__":
    main(sys.argv[1])
