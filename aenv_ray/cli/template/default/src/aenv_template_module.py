"""Guess a hidden number. Replace it with your own environment; the shape stays the same.

Every instance is a process of its own, so plain module state is the state of one episode.
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
    """Look at the state, not at what the agent says: 1.0 for seven guesses or fewer, then less."""
    if game.secret not in game.guesses:
        return 0.0
    return min(1.0, 7 / (game.guesses.index(game.secret) + 1))


@register_function
def new_game(seed: int) -> dict[str, int]:
    """Begin an episode; for the trainer, the agent cannot call it."""
    game.secret = random.Random(seed).randint(1, 100)
    game.guesses.clear()
    return {"lowest": 1, "highest": 100}


@register_health
def healthy() -> bool:
    """Say whether the instance can go on; raising says no, with the reason."""
    return 1 <= game.secret <= 100
