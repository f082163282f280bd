"""Environments of the package Gymnasium, stepped by an agent's tool calls.

The trainer's reset makes and seeds the environment; the agent only steps, so it can neither start
over nor choose a seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from games import Game, GameSpec, spec_of
from pictures import png
from solvers import solution
from spaces import is_image, plain

from aenv_ray.runtime import (
    Image,
    register_function,
    register_reset,
    register_reward,
    register_tasks,
    register_tool,
)

DEFAULT_SEED: Final = 42
INSTRUCTION: Final = (
    "Play {env} to its end. describe returns its rules, and step takes an action. {goal}"
)
_DEFAULTS: Final[tuple[tuple[dict[str, Any], int, float], ...]] = (
    ({"env": "FrozenLake-v1", "kwargs": {"is_slippery": False}}, 1, 0.0),
    ({"env": "FrozenLake8x8-v1", "kwargs": {"is_slippery": False}}, 1, 0.0),
    ({"env": "Taxi-v4"}, 20, -200.0),
    ({"env": "CliffWalking-v1", "max_episode_steps": 200}, 1, -200.0),
    ({"env": "CartPole-v1"}, 10, 0.0),
    ({"env": "CartPole-v1", "num_envs": 4}, 2, 0.0),
    ({"env": "MountainCar-v0"}, 5, -200.0),
    ({"env": "MountainCarContinuous-v0"}, 5, 0.0),
)
"""Default tasks: a game, how many seeds, and the return that scores 0.0."""

_game: Game | None = None


def _running() -> Game:
    if _game is None:
        raise RuntimeError("no game was started: reset the instance with a task, or sample it")
    return _game


@register_tool
def step(action: int | float | str | list[Any] | dict[str, Any]) -> Any:
    """Take one step.

    Args:
        action: An element of the action space, as `describe` says: a number, or a list of them. In
            a vector of environments, a list with an action for each.

    Returns:
        ``observation``, ``reward``, ``terminated``, ``truncated``, ``info`` and ``steps``. Images
        in the observation follow as images. In a vector these are lists; an environment that has
        ended starts over with its next step, and only its first episode counts.

    Raises:
        ValueError: The action is not in the action space; nothing has changed.
        RuntimeError: The game has ended.
    """
    game = _running()
    reward = game.step(action)
    return _shown(game, reward)


@register_tool(idempotent=True)
def get_observation() -> Any:
    """Return the current observation, without taking a step."""
    return _shown(_running(), None)


@register_tool(idempotent=True)
def render() -> Any:
    """Return a drawing of the current state: an image, or text."""
    drawn = _running().render()
    if isinstance(drawn, tuple | list):
        return [_drawing(one) for one in drawn]
    return _drawing(drawn)


@register_tool(idempotent=True)
def describe() -> dict[str, Any]:
    """Return the rules: how to write an action, the spaces, the limits, and the documentation."""
    return _running().describe()


@register_reset
def start_game(task: Any, seed: int | None) -> None:
    """Make and seed the environment of a task, which has the fields of a `GameSpec`.

    Raises:
        ValueError: The environment is unknown, or a field is invalid.
    """
    global _game
    if _game is not None:
        _game.close()
    _game = None
    if task is not None:
        _game = Game(spec_of(task, seed))


@register_reward
def episode_return(low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return the sum of the rewards so far, or how good it is.

    Args:
        low: The return that scores 0.0.
        high: The return that scores 1.0, above `low`. With both, the score is between 0.0 and 1.0,
            and 0.0 if the game has not ended.

    Returns:
        ``score``; ``return``, in a vector the mean of ``returns``; ``steps``, ``terminated``,
        ``truncated``.

    Raises:
        RuntimeError: No game was started.
        ValueError: One limit is missing, or `high` is not above `low`.
    """
    game = _running()
    if (low is None) != (high is None) or (low is not None and high is not None and high <= low):
        raise ValueError(f"give low and high, with low < high, or none of them; not {low}, {high}")
    score = game.result
    if low is not None and high is not None:
        score = min(1.0, max(0.0, (score - low) / (high - low))) if game.has_ended else 0.0
    return {
        "score": score,
        "return": game.result,
        "returns": game.returns,
        "steps": game.steps,
        "terminated": game.terminated,
        "truncated": game.truncated,
    }


@register_function
def list_environments() -> list[str]:
    """Return the ids that Gymnasium knows; some need packages that are not installed here."""
    import gymnasium

    return sorted(gymnasium.registry)


@register_tasks(timeout=300)
def tasks() -> Iterator[dict[str, Any]]:
    """Yield the default tasks, or those that variables of the instance ask for.

    Raises:
        ValueError: A variable is invalid, or an environment cannot be made.
    """
    asked = [name.strip() for name in os.environ.get("GYMNASIUM_ENVS", "").split(",")]
    first, count = _number("GYMNASIUM_SEED", DEFAULT_SEED), _number("GYMNASIUM_COUNT", 10)
    if any(asked):
        games = [({"env": name}, count, None) for name in asked if name]
    else:
        games = list(_DEFAULTS)
    for fields, seeds, low in games:
        for seed in range(first, first + seeds):
            yield _task(GameSpec(**fields, seed=seed), low)


def _task(spec: GameSpec, low: float | None) -> dict[str, Any]:
    if low is None:
        Game(spec).close()  # raises if it cannot be made
    found = solution(spec) if low is not None else None
    vector = "" if spec.num_envs is None else f"x{spec.num_envs}"
    goal, limits, actions = "Maximize the sum of the rewards.", {}, []
    if low is not None and found is not None:
        actions, high = found
        limits = {"low": low, "high": high}
        goal = f"{goal} A return of {high:g} is the full score, {low:g} or less is none."
    return {
        "id": f"{spec.env}{vector}-{spec.seed}",
        "instruction": INSTRUCTION.format(env=spec.env, goal=goal),
        **spec.model_dump(exclude_none=True),
        "reward": {"name": "episode_return", "arguments": limits},
        "reference": [{"tool": "step", "arguments": {"action": action}} for action in actions],
    }


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ValueError(f"{variable} is {text!r}; give a whole number")
    return int(text)


def _shown(game: Game, reward: Any) -> Any:
    """Return a step as JSON data, followed by the images in it if there are any."""
    images: list[Any] = []
    shown = {
        "observation": plain(game.observation, images, is_batch=game.is_vector),
        "reward": reward,
        "terminated": game.terminated if game.is_vector else game.terminated[0],
        "truncated": game.truncated if game.is_vector else game.truncated[0],
        "info": plain(game.info),
        "steps": game.steps,
    }
    if not images:
        return shown
    return [shown, *(Image(png(image)) for image in images)]


def _drawing(drawn: Any) -> Any:
    return Image(png(drawn)) if is_image(drawn, least_side=1) else plain(drawn)
