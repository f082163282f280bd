"""Environments for GEM, which ROLL and OpenRLHF's example use too.

    gem.register("terminal", "aenv_ray.integrations.gem:GemEnv", environment="mini-terminal",
                 tasks=environment_tasks("mini-terminal"))  # of aenv_ray.sampling
    env = gem.make("terminal")

Actions are texts, see `aenv_ray.integrations.support.text_actions`. The last step has the reward of
the episode; its ``info`` has ``void``, and ``episode_record``. The reward of a void episode is 0.0
because GEM has no other: leave steps with ``void`` out of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aenv_ray.errors import ConfigError
from aenv_ray.integrations.episodes import shared_pool
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.text_actions import MAX_TURNS, TextEpisode

require("gem-llm", "gem", "0.1", "1")

from gem.core import Env  # noqa: E402


class GemEnv(Env):
    """One instance; environments with the same `environment` and options share a pool.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        tasks: A reset chooses one of them, by its seed.
        only: Names of the tools to offer. None: all.
        max_turns: Number of texts after which an episode is truncated.
        seed: Seed for the choice of tasks.
        options: Options of the `EpisodePool`.
    """

    def __init__(
        self,
        environment: str,
        tasks: Sequence[Mapping[str, Any]],
        *,
        only: Collection[str] | None = None,
        max_turns: int = MAX_TURNS,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not tasks:
            raise ConfigError("GemEnv needs at least one task", hint='tasks=[{"id": "first"}]')
        self._given = {
            "environment": environment, "tasks": tasks, "only": only, "max_turns": max_turns,
            **options,
        }  # fmt: skip
        self._pool = shared_pool(environment, **options)
        self._tasks = tasks
        self._only = only
        self._max_turns = max_turns
        self._random = random.Random(seed)
        self._playing: TextEpisode | None = None
        self._has_place = True
        self._pool.reserve()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; return its instruction, and how to call the tools."""
        super().reset(seed)
        if seed is not None:
            self._random.seed(seed)
        self._end()
        task = self._random.choice(self._tasks)
        given = task if seed is None else {"seed": seed, **task}
        episode = self._pool.begin_blocking(given)
        self._playing = TextEpisode(episode, only=self._only, max_turns=self._max_turns)
        parts = (episode.task.instruction, self._playing.instructions())
        return "\n\n".join(filter(None, parts)), {"task_id": episode.task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the calls of a text.

        Raises:
            ConfigError: There was no reset.
        """
        if self._playing is None:
            raise ConfigError("the episode has ended, or has not begun", hint="call reset()")
        turn = self._playing.act(action)
        if turn.outcome is None:
            return turn.observation, 0.0, False, False, {}
        self._playing = None
        is_void = turn.outcome.is_void
        info = {"void": is_void, "episode_record": turn.outcome.episode}
        truncated = turn.is_truncated or is_void
        return turn.observation, turn.outcome.reward or 0.0, not truncated, truncated, info

    @property
    def instance_id(self) -> str | None:
        """The id of the running episode's instance; None if no episode runs."""
        return None if self._playing is None else self._playing.instance_id

    def spawn(self, same_state: bool = False, **kwargs: Any) -> GemEnv:
        """Return another environment with the same arguments.

        Raises:
            ConfigError: `same_state` is set: instances cannot be copied.
        """
        if same_state:
            raise ConfigError("an instance cannot be copied", hint="spawn(same_state=False)")
        return GemEnv(**{**self._given, **kwargs})

    def _end(self) -> None:
        if self._playing is not None:
            self._playing.close()
            self._playing = None

    def close(self) -> None:
        """End the episode and give up its reserved instance, any number of times."""
        if not self._pool.is_closed:
            self._end()
            if self._has_place:
                self._has_place = False
                self._pool.reserve(-1)
