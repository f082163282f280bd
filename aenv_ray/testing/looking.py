"""How often to look at what another process is to do: late by little, and never all the time."""

from __future__ import annotations

from typing import Final

_AT_LEAST_S: Final = 0.02
_AT_MOST_S: Final = 0.5
_SHARE_OF_WAIT: Final = 0.05
_TIMES_COST: Final = 4.0


def pause_s(waited_s: float, look_s: float) -> float:
    """Return how long to wait before the next look, in seconds.

    Looks take a fifth of a core at most: on a busy machine whoever looks takes time from what he
    waits for. What comes is seen when a twentieth of the wait more has passed, and within half a
    second.

    Args:
        waited_s: Since the first look.
        look_s: What the last look took.
    """
    wanted = max(_AT_LEAST_S, waited_s * _SHARE_OF_WAIT, look_s * _TIMES_COST)
    return min(_AT_MOST_S, wanted)
