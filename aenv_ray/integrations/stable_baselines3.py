"""Environments for Stable-Baselines3, all stepped at the same time.

    env = ToolVecEnv(EpisodePool("gymnasium"), {"env": "CartPole-v1"}, 8, observations, actions)
    PPO("MlpPolicy", VecMonitor(env)).learn(10_000)

A void episode ends like one that reached a time limit, with ``info["void"]``, so that the value of
its last observation is bootstrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.gymnasium import Step, ToolEnv, ToolGame
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import at_once

require("stable-baselines3", "stable-baselines3", "2.7", "3")

from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402


class ToolVecEnv(DummyVecEnv):
    """Instances of one environment.

    Args:
        pool: Plays the episodes.
        game: A `ToolGame`, or the task of one.
        num_envs: Number of instances.
        observation_space: Observation space of one instance.
        action_space: Action space of one instance.
    """

    def __init__(
        self,
        pool: EpisodePool,
        game: ToolGame | Mapping[str, Any],
        num_envs: int,
        observation_space: Any,
        action_space: Any,
    ) -> None:
        self._pool = pool
        make = [lambda: ToolEnv(pool, game, observation_space, action_space)] * num_envs
        super().__init__(make)

    def step_wait(self) -> Any:
        """Take the steps of `step_async` at the same time; begin the next of ended episodes.

        Raises:
            AenvError: One cannot begin.
        """
        for index, (step, begun) in enumerate(self._pool.run(self._steps())):
            observation, reward, terminated, truncated, info = step
            self.buf_infos[index] = {**info, "TimeLimit.truncated": truncated and not terminated}
            if begun is not None:
                self.buf_infos[index]["terminal_observation"] = observation
                observation, self.reset_infos[index] = begun
            self.buf_rews[index] = reward
            self.buf_dones[index] = begun is not None
            self._save_obs(index, observation)
        infos = [dict(info) for info in self.buf_infos]
        return self._obs_from_buf(), self.buf_rews.copy(), self.buf_dones.copy(), infos

    async def _steps(self) -> list[tuple[Step, tuple[Any, dict[str, Any]] | None]]:
        pairs = zip(self.envs, self.actions, strict=True)
        return await at_once(_step(env, action) for env, action in pairs)


async def _step(env: ToolEnv, action: Any) -> tuple[Step, tuple[Any, dict[str, Any]] | None]:
    """Take a step; return it, and the first observation and info if another episode begins."""
    done = await env.seat.step(action)
    return done, await env.seat.reset(None, {}) if done[2] or done[3] else None
