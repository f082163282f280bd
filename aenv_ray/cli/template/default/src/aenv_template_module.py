"""Guess a hidden number. Replace this with your own environment; the structure stays the same.

Every instance is a separate process, so the state of this module is the state of one episode.
"""

import random
from dataclasses import dataclass, field

from aenv_ray.runtime import register_function, register_health, register_reward, register_tool


@dataclass
class Game:
    """One episode: what is hidden, and what the agent tried."""

    secret: int = 50
    guesses: list[int] = field(default_factory=list)


game = Game()


@register_tool
def guess(number: int) -> str:
    """Guess the hidden number from 1 to 100.

    Args:
        number: The guess.
    """
    game.guesses.append(number)
    if number == game.secret:
        return f"correct, after {len(game.guesses)} guesses"
    return "higher" if number < game.secret else "lower"


@register_reward
def solved() -> float:
    """Return 1.0 for up to seven guesses, then less; judge the state, not the agent's words."""
    if game.secret not in game.guesses:
        return 0.0
    return min(1.0, 7 / (game.guesses.index(game.secret) + 1))


@register_function
def new_game(seed: int) -> dict[str, int]:
    """Begin an episode. The trainer calls this; the agent cannot."""
    game.secret = random.Random(seed).randint(1, 100)
    game.guesses.clear()
    return {"lowest": 1, "highest": 100}


@register_health
def healthy() -> bool:
    """Return whether the instance works; to report why it does not, raise an exception."""
    return 1 <= game.secret <= 100
