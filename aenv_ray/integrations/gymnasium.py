"""Environments as `gymnasium.Env` and `gymnasium.vector.VectorEnv`.

    env = ToolEnv(EpisodePool("gymnasium"), {"env": "CartPole-v1"}, observations, actions)

A step calls a tool, which answers with what the built-in environment ``gymnasium`` does: a mapping
with ``observation``, ``reward``, ``terminated``, ``truncated`` and ``info``. For other tools,
override `ToolGame`. If steps have no ``reward``, the last one has that of the environment.

A step that fails is the last of its episode: it repeats the observation, and ``info["error"]`` says
why. If the tool raised, or something in the sandbox ended it, that is the outcome of the episode:
``terminated`` is set, and the reward is that of the environment, or 0.0. If the sandbox is lost,
the reward is 0.0, ``truncated`` is set, and ``info["void"]`` is true. The same applies if the
infrastructure fails while the reward is computed after the last step. A trainer that bootstraps
truncated episodes learns no return from such a step; one with a mask leaves out the steps with
``void``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from aenv_ray.errors import AenvError, ConfigError, FunctionFailed, SandboxStartFailed
from aenv_ray.integrations.episodes import EpisodeOutcome, EpisodePool, LiveEpisode
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import at_once
from aenv_ray.models import ToolResult

require("gymnasium", "gymnasium", "1.0", "2")

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

logger = logging.getLogger("aenv_ray")

STEP_TOOL: Final = "step"
OBSERVE_TOOL: Final = "get_observation"

Step: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


@dataclass(frozen=True)
class Transition:
    """What a step did."""

    observation: Any
    """JSON data."""
    reward: float | None = None
    """None: the environment's reward, after the last step."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class ToolGame:
    """How actions become tool calls, and their results transitions.

    Args:
        task: The task of the episodes, as in `aenv_ray.sample`; or a function that is given the
            seed and the options of a reset and returns it.
        step: The tool of a step.
        observe: The tool that returns the first observation.
        timeout_s: Timeout of a call. None: 60.
    """

    def __init__(
        self,
        task: Mapping[str, Any] | Callable[[int | None, Mapping[str, Any]], Mapping[str, Any]],
        *,
        step: str = STEP_TOOL,
        observe: str = OBSERVE_TOOL,
        timeout_s: float | None = None,
    ) -> None:
        self._task = task
        self._step = step
        self._observe = observe
        self._timeout_s = timeout_s

    def task(self, seed: int | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the task of an episode."""
        if callable(self._task):
            return self._task(seed, options)
        return {**self._task, **options, **({} if seed is None else {"seed": seed})}

    async def observe(self, episode: LiveEpisode) -> Transition:
        """Return the first observation."""
        return self.transition(await episode.call_tool(self._observe, {}, self._timeout_s))

    async def step(self, episode: LiveEpisode, action: Any) -> Transition:
        """Take a step.

        Args:
            episode: The episode that is being played.
            action: JSON data.
        """
        given = {"action": action}
        return self.transition(await episode.call_tool(self._step, given, self._timeout_s))

    def transition(self, result: ToolResult) -> Transition:
        """Return what a result says.

        Raises:
            FunctionFailed: The tool raised, which ends the episode.
            ConfigError: It has no observation.
        """
        if result.is_error:
            raise FunctionFailed(
                f"a step failed: {result.text()[:300]}",
                hint="the tool must not fail on a valid action; see the log of the instance",
            )
        data = result.data[0] if isinstance(result.data, list) and result.data else result.data
        if not isinstance(data, Mapping) or "observation" not in data:
            raise ConfigError(
                f"a step returned {str(result.data)[:200]!r}, which has no observation",
                hint="override ToolGame.transition",
            )
        names = ("observation", "reward", "terminated", "truncated", "info")
        given = {name: data[name] for name in names if data.get(name) is not None}
        return Transition(**given)


class Seat:
    """One environment of a trainer, on the event loop of the pool."""

    def __init__(self, pool: EpisodePool, game: ToolGame, observations: Any, actions: Any) -> None:
        self._pool = pool
        self._game = game
        self._observations = observations
        self._actions = actions
        self._episode: LiveEpisode | None = None
        self._last: Any = None

    async def reset(
        self, seed: int | None, options: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, after the end of the one that runs.

        Raises:
            SandboxStartFailed: No instance was started, or the task cannot be set up.
            ConfigError: There is no first observation, or it is not in the space.
            AenvError: As `EpisodePool.begin`.
        """
        await self.close()
        self._episode = await self._pool.begin(self._game.task(seed, options))
        try:
            first = await self._game.observe(self._episode)
        except ConfigError:
            await self.close()
            raise
        except AenvError as exc:
            outcome = await self._finished()
            raise SandboxStartFailed(
                f"an episode of {self._pool.env_name} cannot begin: {outcome.episode.error or exc}",
                hint=exc.hint or "correct the environment's reset or the tool of its observations",
            ) from exc
        self._last = in_space(self._observations, first.observation)
        return self._last, dict(first.info)

    async def step(self, action: Any) -> Step:
        """Take a step; if it fails, the last one of the episode.

        Raises:
            ConfigError: There was no reset, or the result is not a step's.
        """
        if self._episode is None:
            raise ConfigError("the episode has ended, or has not begun", hint="call reset()")
        try:
            done = await self._game.step(self._episode, as_json(self._actions, action))
        except ConfigError:
            raise
        except AenvError as exc:
            logger.info("a step of %s failed: %s", self._pool.env_name, exc.message)
            outcome = await self._finished()
            info, is_void = self._end(outcome) | {"error": exc.message}, outcome.is_void
            return self._last, outcome.reward or 0.0, not is_void, is_void, info
        self._last = in_space(self._observations, done.observation)
        reward, info = done.reward, dict(done.info)
        terminated, truncated = done.terminated, done.truncated
        if terminated or truncated:
            outcome = await self._finished()
            info |= self._end(outcome)
            reward = outcome.reward if reward is None else reward
            if outcome.is_void:  # a trainer must not learn the return of a void episode
                terminated, truncated = False, True
        return self._last, float(reward or 0.0), terminated, truncated, info

    def _end(self, outcome: EpisodeOutcome) -> dict[str, Any]:
        return {"void": outcome.is_void, "episode_record": outcome.episode}

    async def _finished(self) -> EpisodeOutcome:
        assert self._episode is not None
        episode, self._episode = self._episode, None
        return await episode.finish()

    @property
    def instance_id(self) -> str | None:
        """The id of the running episode's instance; None if no episode runs."""
        return None if self._episode is None else self._episode.instance_id

    async def close(self) -> None:
        """End the episode that runs, with its reward, so that it is recorded."""
        if self._episode is not None:
            await self._finished()


class ToolEnv(gymnasium.Env):
    """One instance as an environment of Gymnasium.

    Args:
        pool: Plays the episodes; several environments may share one.
        game: A `ToolGame`, or the task of one.
        observation_space: What observations are, as JSON data: numbers, lists, text, mappings.
        action_space: What actions are.

    Attributes:
        seat: Its episodes; runs on the event loop of the pool.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        pool: EpisodePool,
        game: ToolGame | Mapping[str, Any],
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self._pool = pool
        self.seat = Seat(pool, _game(game), observation_space, action_space)
        self._has_place = True
        pool.reserve()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; see `ToolGame.task`.

        Raises:
            AenvError: It cannot begin.
        """
        super().reset(seed=seed)
        return self._pool.run(self.seat.reset(seed, options or {}))

    def step(self, action: Any) -> Step:
        """Take a step; ``info`` of the last one has ``void`` and ``episode_record``."""
        return self._pool.run(self.seat.step(action))

    def close(self) -> None:
        """Give the place back, any number of times; the pool remains open."""
        if not self._pool.is_closed:
            self._pool.run(self.seat.close())
            if self._has_place:
                self._has_place = False
                self._pool.reserve(-1)


class VectorToolEnv(gymnasium.vector.VectorEnv):
    """Instances that are stepped at once; one that has ended is reset by its next step.

    Args:
        pool: Plays the episodes.
        game: A `ToolGame`, or the task of one.
        num_envs: Number of instances.
        observation_space: Observation space of one instance.
        action_space: Action space of one instance.

    Attributes:
        seats: The episodes of each instance, on the event loop of the pool.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
        "render_modes": [],
    }

    def __init__(
        self,
        pool: EpisodePool,
        game: ToolGame | Mapping[str, Any],
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        batch = gymnasium.vector.utils.batch_space
        self.observation_space = batch(observation_space, num_envs)
        self.action_space = batch(action_space, num_envs)
        self._pool = pool
        self._has_ended = [False] * num_envs
        self.seats = [
            Seat(pool, _game(game), observation_space, action_space) for _ in range(num_envs)
        ]
        pool.reserve(num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of each instance, all at once.

        Raises:
            AenvError: One cannot begin.
        """
        if isinstance(seed, int):
            seed = [seed + index for index in range(self.num_envs)]
        seeds = [None] * self.num_envs if seed is None else list(seed)
        found = self._pool.run(self._reset(seeds, options or {}))
        self._has_ended = [False] * self.num_envs
        infos: dict[str, Any] = {}
        for index, (_, info) in enumerate(found):
            infos = self._add_info(infos, info, index)
        return self._batched([observation for observation, _ in found]), infos

    async def _reset(
        self, seeds: Sequence[int | None], options: Mapping[str, Any]
    ) -> list[tuple[Any, dict[str, Any]]]:
        pairs = zip(self.seats, seeds, strict=True)
        return await at_once(seat.reset(seed, options) for seat, seed in pairs)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in each instance, all at once.

        Returns:
            As Gymnasium documents; ``infos["void"]`` says which episodes ended without a result.
        """
        each = list(gymnasium.vector.utils.iterate(self.action_space, actions))
        found = self._pool.run(self._step(each))
        observations, rewards, terminated, truncated, one_by_one = zip(*found, strict=True)
        self._has_ended = [a or b for a, b in zip(terminated, truncated, strict=True)]
        infos: dict[str, Any] = {}
        for index, info in enumerate(one_by_one):
            infos = self._add_info(infos, info, index)
        flags = np.array(terminated, dtype=np.bool_), np.array(truncated, dtype=np.bool_)
        return self._batched(observations), np.array(rewards, dtype=np.float64), *flags, infos

    async def _step(self, actions: Sequence[Any]) -> list[Step]:
        return await at_once(self._step_one(index, action) for index, action in enumerate(actions))

    async def _step_one(self, index: int, action: Any) -> Step:
        if not self._has_ended[index]:
            return await self.seats[index].step(action)
        observation, info = await self.seats[index].reset(None, {})
        return observation, 0.0, False, False, info

    def _batched(self, observations: Sequence[Any]) -> Any:
        utils = gymnasium.vector.utils
        empty = utils.create_empty_array(self.single_observation_space, n=self.num_envs)
        return utils.concatenate(self.single_observation_space, observations, empty)

    def close_extras(self, **kwargs: Any) -> None:
        """Give the places back; the pool remains open."""
        del kwargs
        if not self._pool.is_closed:
            self._pool.run(self._close())
            self._pool.reserve(-self.num_envs)

    async def _close(self) -> None:
        await at_once(seat.close() for seat in self.seats)


def _game(game: ToolGame | Mapping[str, Any]) -> ToolGame:
    return game if isinstance(game, ToolGame) else ToolGame(game)


def in_space(space: Any, data: Any) -> Any:
    """Return JSON data as an element of a space.

    Raises:
        ConfigError: It has another shape, or lacks a part.
    """
    try:
        if isinstance(space, spaces.Dict):
            return {name: in_space(part, data[name]) for name, part in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(in_space(part, one) for part, one in zip(space, data, strict=True))
        if isinstance(space, spaces.Text):
            return str(data)
        if isinstance(space, spaces.Discrete):
            return space.dtype.type(data)
        return np.asarray(data, dtype=space.dtype).reshape(space.shape)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"an observation is not in {space}: {type(exc).__name__}: {exc}",
            hint="correct the observation space, or override ToolGame.transition",
        ) from exc


def as_json(space: Any, element: Any) -> Any:
    """Return an element of a space as JSON data."""
    if isinstance(space, spaces.Dict):
        return {name: as_json(part, element[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return [as_json(part, one) for part, one in zip(space, element, strict=True)]
    return element if isinstance(element, str) else np.asarray(element).tolist()
