"""One game: an environment of Gymnasium, or a vector of them, from its reset to its end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads cannot be a template of others
for _driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):  # pygame draws into memory
    os.environ[_driver] = "dummy"

import gymnasium  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field, ValidationError  # noqa: E402
from spaces import action_of, actions_of, how_to_write, how_to_write_all  # noqa: E402

MAX_DOCUMENTATION: Final = 6_000
"""Characters of an environment's documentation that an agent gets."""


class GameSpec(BaseModel):
    """What `gymnasium.make` and `reset` are called with."""

    model_config = ConfigDict(frozen=True)

    env: str
    """Id, such as ``CartPole-v1``."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the environment."""
    seed: int | None = Field(default=None, ge=0)
    """The seed of the reset; None: random."""
    options: dict[str, Any] | None = None
    """The options of the reset."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """None: as registered."""
    num_envs: int | None = Field(default=None, ge=1, le=4096)
    """Makes a vector of this many environments; None: a single environment."""
    vectorization: Literal["sync", "vector_entry_point"] = "sync"
    render_mode: Literal["rgb_array", "ansi"] | None = None
    """None: an image if the environment can draw one, else text; a vector is not drawn."""


def spec_of(task: Any, seed: int | None) -> GameSpec:
    """Return the game in a task's fields; `seed` is used if the task has none.

    Raises:
        ValueError: A field is missing or invalid.
    """
    if not isinstance(task, dict) or not task.get("env"):
        raise ValueError('a task names its environment: {"env": "CartPole-v1", "seed": 1}')
    fields = {name: task[name] for name in GameSpec.model_fields if task.get(name) is not None}
    try:
        return GameSpec.model_validate({"seed": seed} | fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"task {task.get('id', '')!r}: {place}: {first['msg']}") from None


class Game:
    """A game that has been reset.

    Args:
        spec: What to make, and with which seed.

    Raises:
        ValueError: The environment is unknown, it needs packages that are not installed, or it
            refuses its arguments.
    """

    def __init__(self, spec: GameSpec) -> None:
        self.spec = spec
        count = spec.num_envs or 1
        with _named_errors(spec):
            self._made = self._make()
            self.observation, self.info = self._made.reset(seed=spec.seed, options=spec.options)
        self.returns = [0.0] * count
        """Sums of the rewards of each environment's first episode."""
        self.terminated = [False] * count
        self.truncated = [False] * count
        self.steps = 0

    def _make(self) -> Any:
        spec = self.spec
        options: dict[str, Any] = dict(spec.kwargs)
        if spec.max_episode_steps is not None:
            options["max_episode_steps"] = spec.max_episode_steps
        mode = spec.render_mode if self.is_vector else spec.render_mode or self._render_mode()
        if mode is not None:
            options["render_mode"] = mode
        if spec.num_envs is not None:
            return gymnasium.make_vec(
                spec.env, spec.num_envs, vectorization_mode=spec.vectorization, **options
            )
        return gymnasium.make(spec.env, **options)

    def _render_mode(self) -> str | None:
        probe = gymnasium.make(self.spec.env, **self.spec.kwargs)
        known = probe.metadata.get("render_modes", [])
        probe.close()
        return next((mode for mode in ("rgb_array", "ansi") if mode in known), None)

    @property
    def is_vector(self) -> bool:
        """Whether it has several environments."""
        return self.spec.num_envs is not None

    @property
    def has_ended(self) -> bool:
        """Whether each environment's first episode was terminated or truncated."""
        return all(t or c for t, c in zip(self.terminated, self.truncated, strict=True))

    @property
    def result(self) -> float:
        """The return; of a vector, the mean return of the first episodes."""
        return sum(self.returns) / len(self.returns)

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self._made.unwrapped

    def step(self, value: Any) -> Any:
        """Take a step; return its rewards.

        Args:
            value: JSON data of an action; of a vector, a list with an action for each environment.

        Raises:
            ActionInvalid: It is not an action. Nothing has changed.
            RuntimeError: The game has ended.
        """
        if self.has_ended:
            raise RuntimeError("the game has ended: nothing more can be done in it")
        if self.spec.num_envs is None:
            action = action_of(self._made.action_space, value)
        else:
            action = actions_of(self._made.single_action_space, value, self.spec.num_envs)
        self.observation, rewards, terminated, truncated, self.info = self._made.step(action)
        self.steps += 1
        if not self.is_vector:
            self._count(0, rewards, terminated, truncated)
            return float(rewards)
        for index in range(len(self.returns)):
            if not (self.terminated[index] or self.truncated[index]):
                self._count(index, rewards[index], terminated[index], truncated[index])
        return [float(reward) for reward in rewards]

    def _count(self, index: int, reward: Any, terminated: Any, truncated: Any) -> None:
        self.returns[index] += float(reward)
        self.terminated[index] = bool(terminated)
        self.truncated[index] = bool(truncated)

    def render(self) -> Any:
        """Return an array of pixels, a text, or for a vector a tuple of them.

        Raises:
            RuntimeError: The environment cannot be drawn.
        """
        if self._made.render_mode is None:
            raise RuntimeError(f"{self.spec.env} cannot be drawn here")
        with _named_errors(self.spec):
            return self._made.render()

    def describe(self) -> dict[str, Any]:
        """Return what an agent has to know: spaces, limits and the package's documentation."""
        if self.spec.num_envs is None:
            action = how_to_write(self._made.action_space)
        else:
            action = how_to_write_all(self._made.single_action_space, self.spec.num_envs)
        registered = self._made.spec
        text = inspect.getdoc(_inner(self._made)) or ""
        return {
            "env": self.spec.env,
            "action_space": str(self._made.action_space),
            "action": action,
            "observation_space": str(self._made.observation_space),
            "num_envs": self.spec.num_envs,
            "max_episode_steps": getattr(registered, "max_episode_steps", None),
            "reward_threshold": getattr(registered, "reward_threshold", None),
            "documentation": text[:MAX_DOCUMENTATION],
        }

    def close(self) -> None:
        """Free what the environment holds."""
        self._made.close()


def _inner(made: Any) -> Any:
    environments = getattr(made, "envs", None)
    return (environments[0] if environments else made).unwrapped


@contextmanager
def _named_errors(spec: GameSpec) -> Iterator[None]:
    """Turn what Gymnasium raises for wrong arguments into errors that name the environment.

    Raises:
        ValueError: See `Game`.
    """
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ImportError) as exc:
        raise ValueError(
            f"{spec.env} needs a package that is not installed: {exc}; add it to requirements.txt "
            "of a copy of this environment, for example gymnasium[box2d]"
        ) from exc
    except (gymnasium.error.Error, AssertionError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(
            f"environment {spec.env} cannot be made with {spec.kwargs}: {type(exc).__name__}: {exc}"
        ) from exc
