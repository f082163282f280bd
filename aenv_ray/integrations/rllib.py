"""Environments for RLlib.

    register_env("corridor", rllib.creator("corridor", task, observations, actions))
    config = PPOConfig().environment("corridor")

Each env runner has its own pool. ``info["void"]`` of the last step marks void episodes; they are
truncated, so that RLlib bootstraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aenv_ray.integrations.episodes import shared_pool
from aenv_ray.integrations.gymnasium import ToolEnv, ToolGame
from aenv_ray.integrations.support.requirement import require

require("ray", "rllib", "2.52", "3")


def creator(
    environment: str,
    game: ToolGame | Mapping[str, Any],
    observation_space: Any,
    action_space: Any,
    **options: Any,
) -> Callable[[Mapping[str, Any]], ToolEnv]:
    """Return a function for ``ray.tune.register_env``.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        game: A `ToolGame`, or the task of one.
        observation_space: What observations are.
        action_space: What actions are.
        options: The options of the `EpisodePool`; RLlib's ``env_config`` is added to them.
    """

    def create(env_config: Mapping[str, Any]) -> ToolEnv:
        pool = shared_pool(environment, **{**options, **env_config})
        return ToolEnv(pool, game, observation_space, action_space)

    return create
