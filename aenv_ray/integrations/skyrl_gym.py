"""Environments for SkyRL, as text environments of skyrl-gym.

    skyrl_gym.register("terminal", "aenv_ray.integrations.skyrl_gym:SkyRLEnv",
                       kwargs={"environment": "mini-terminal"})

A row of the dataset names it with ``env_class: terminal``, and has the episode's task under
``task``. Actions are texts, see `aenv_ray.integrations.support.text_actions`.

SkyRL needs a number for each trajectory: that of a void episode is 0.0, and its metrics have
``void``. `mask_void` takes such a trajectory out of the loss; call it in the generator's
``_finalize_episode``. The baseline of its group still counts it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from aenv_ray.integrations.episodes import EpisodeOutcome, shared_pool
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.text_actions import MAX_TURNS, TextEpisode

require("skyrl-gym", "skyrl-gym", "0.4", "1")

from skyrl_gym.envs.base_text_env import (  # noqa: E402
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
)


class SkyRLEnv(BaseTextEnv):
    """One episode; environments with the same `environment` and options share a pool.

    Args:
        env_config: What SkyRL passes; not used.
        extras: The columns of the row: ``task``, and ``max_turns``, which SkyRL sets.
        environment: ``name@version``, ``name``, or the path of a project.
        only: Names of the tools to offer. None: all.
        options: The options of the `EpisodePool`.
    """

    def __init__(
        self,
        env_config: Any = None,
        extras: Mapping[str, Any] | None = None,
        *,
        environment: str,
        only: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        del env_config
        given = extras or {}
        self.max_turns = int(given.get("max_turns", MAX_TURNS))
        self._task = given.get("task") or {}
        self._pool = shared_pool(environment, **options)
        self._only = only
        self._playing: TextEpisode | None = None
        self.outcome: EpisodeOutcome | None = None
        """The outcome of the episode, once it has ended."""

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Begin the episode; return the prompt with how to call the tools as system message."""
        episode = self._pool.begin_blocking(self._task)
        self._playing = TextEpisode(episode, only=self._only, max_turns=self.max_turns)
        how = self._playing.instructions()
        if prompt and prompt[0]["role"] == "system":
            first = {**prompt[0], "content": f"{prompt[0]['content']}\n\n{how}"}
            return [first, *prompt[1:]], {}
        return [{"role": "system", "content": how}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the calls of a text; after the last one, the reward is that of the episode."""
        assert self._playing is not None, "SkyRL calls init first"
        self.turns += 1
        turn = self._playing.act(action)
        self.outcome = turn.outcome
        reward = 0.0 if turn.outcome is None else turn.outcome.reward or 0.0
        is_over = turn.outcome is not None
        shown = [{"role": "user", "content": turn.observation}] if turn.observation else []
        return BaseTextEnvStepOutput(
            observations=[] if is_over else shown,
            reward=reward,
            done=is_over,
            metadata={"void": self.is_void},
            postprocessed_action=None,
        )

    @property
    def instance_id(self) -> str | None:
        """The id of the running episode's instance; None if no episode runs."""
        return None if self._playing is None else self._playing.instance_id

    @property
    def is_void(self) -> bool:
        """Whether the episode has ended without a result."""
        return self.outcome is not None and self.outcome.is_void

    def get_metrics(self) -> dict[str, Any]:
        """Return ``turns`` and ``void``, of which SkyRL logs the means."""
        return {"turns": float(self.turns), "void": float(self.is_void)}

    def close(self) -> None:
        """End the episode, if SkyRL has ended it because of its length."""
        if self._playing is not None and self.outcome is None and not self._pool.is_closed:
            self._playing.close()


def mask_void(env: SkyRLEnv, agent_loop_state: Any, agent_loop_output: Any) -> None:
    """Set the loss mask of a void trajectory to zeros.

    Args:
        env: The environment that was played.
        agent_loop_state: As ``_finalize_episode`` of SkyRL's generator gets it.
        agent_loop_output: Likewise; None unless trajectories are trained step by step.
    """
    if not env.is_void:
        return
    agent_loop_state.loss_mask = [0] * len(agent_loop_state.loss_mask)
    for step in [] if agent_loop_output is None else agent_loop_output.step_outputs:
        step.loss_mask = [0] * len(step.loss_mask)
