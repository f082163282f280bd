"""Decides how many episodes a run plays at once, within the bounds that it was given."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aenv_ray.errors import ConfigError, EndpointUnavailable
from aenv_ray.trajectories.schema import Episode, EpisodeStatus

logger = logging.getLogger("aenv_ray")

WINDOW_S: Final = 2.0
"""Minimum time over which the rate of episodes is measured: runners report a few times a second."""
HOLD: Final = 4
"""Windows between a trial that did not pay and the next one; doubled by each further one."""
MOST_HOLD: Final = 16
_FIRST_FACTOR: Final = 2.0
"""Factor of the limit, until a higher one does not pay."""
_FACTOR: Final = 1.5
_WORTH: Final = 0.25
"""A higher limit is kept for this share of the gain that it would bring if nothing were scarce."""
_REFUSED_SHARE: Final = 0.05
"""If more episodes of a window than these are refused, the limit is lowered."""

_TEXT: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class ConcurrencyBounds:
    """The least and the most episodes at once."""

    least: int
    most: int


def concurrency_bounds(given: int | tuple[int, int] | str) -> ConcurrencyBounds:
    """Return the bounds in a number, a pair of numbers, or a text: ``16``, ``8-256``.

    Raises:
        ConfigError: It is none of these, the least is below 1, or the most is below the least.
    """
    found: tuple[object, ...] = ()
    if isinstance(given, str):
        match = _TEXT.fullmatch(given.strip())
        found = () if match is None else tuple(int(one) for one in match.groups(match[1]))
    elif isinstance(given, tuple | list):
        found = tuple(given)
    else:
        found = (given, given)
    match found:
        case (int() as least, int() as most) if 1 <= least <= most:
            return ConcurrencyBounds(least, most)
    raise ConfigError(
        f"concurrency must be a number of at least 1, or a lower and an upper bound, not {given!r}",
        hint="16 plays 16 episodes at once; (8, 256), or 8-256 on the command line, adapts the "
        "number between these bounds",
    )


@dataclass(frozen=True)
class _Trial:
    """The limit was changed, to see whether that pays."""

    limit: int
    """The limit before."""
    rate: float
    """Its episodes per second."""


class ConcurrencyLimit:
    """The number of episodes at once, which follows what the cluster and the policy can do.

    It climbs while the rate of episodes climbs with it. What is scarce may be processors of the
    nodes, the policy, its endpoint, or the reader of the episodes: more at once then only take
    longer. From time to time the next higher and the next lower limit are tried, since any of these
    may change; the lower one is kept if it has nearly the same rate. While episodes wait for room
    in the cluster, the limit does not climb; up to half of them may wait, so that an autoscaler
    sees the demand.

    Args:
        bounds: It stays within these. It begins with at least one whole group, since a lower
            limit plays as many.
        step: Least change: the size of a group.
    """

    def __init__(self, bounds: ConcurrencyBounds, step: int = 1) -> None:
        least = min(max(bounds.least, step), bounds.most)
        self._bounds = ConcurrencyBounds(least, bounds.most)
        self._step = step
        self.limit = least
        """Maximum number of episodes at once."""
        self._factor = _FIRST_FACTOR
        self._trial: _Trial | None = None
        self._goes_up = True
        """Direction of the next trial."""
        self._hold = 0
        """Windows until the next trial."""
        self._next_hold = HOLD
        self._ending = 1
        """Episodes that end before the rate is measured: those beyond a lower limit, and the first
        one, since many began together."""
        self._restart(0.0)

    def _restart(self, now: float) -> None:
        self._since = now
        self._finished = self._refused = self._filled = 0

    def note(self, episodes: Iterable[Episode], now: float, *, is_full: bool, queued: int) -> None:
        """Note that episodes have finished; changes the limit once enough have.

        Tasks with the status `REFUSED` were not played, and are left out.

        Args:
            episodes: These.
            now: The present time, in seconds.
            is_full: Whether as many were played as the limit allows.
            queued: Episodes that wait for room in the cluster now.
        """
        if self._bounds.least == self._bounds.most:
            return
        finished = [one for one in episodes if one.status is not EpisodeStatus.REFUSED]
        if self._ending > 0:
            self._ending -= len(finished)
            self._restart(now)
            return
        self._finished += len(finished)
        self._refused += sum(map(_is_refused, finished))
        self._filled += len(finished) * is_full
        seconds = now - self._since
        if self._finished >= self.limit and seconds >= WINDOW_S:
            self._decide(self._finished / seconds, queued)
            self._restart(now)

    def _decide(self, rate: float, queued: int) -> None:
        trial, self._trial = self._trial, None
        if self._refused > _REFUSED_SHARE * self._finished:
            self._retreat(f"{self._refused} of {self._finished} episodes were refused")
        elif queued > self.limit // 2:
            self._retreat(f"{queued} episodes wait for room in the cluster")
        elif queued or 2 * self._filled < self._finished:
            pass  # the rate says nothing about the limit
        elif trial is not None and not self._pays(trial, rate):
            self._factor = _FACTOR
            self._goes_up = not self._goes_up
            self._hold, self._next_hold = self._next_hold, min(2 * self._next_hold, MOST_HOLD)
            self._change(trial.limit, f"{rate:.3g} episodes/s, after {trial.rate:.3g}")
        elif self._hold:
            self._hold -= 1
        else:
            if trial is not None:
                self._next_hold = HOLD
            self._try(rate)

    def _pays(self, trial: _Trial, rate: float) -> bool:
        """Return whether the limit that is tried is better than the one before."""
        if self.limit > trial.limit:
            return _is_worth(self.limit / trial.limit, rate / trial.rate)
        return not _is_worth(trial.limit / self.limit, trial.rate / rate)

    def _try(self, rate: float) -> None:
        """Try the next limit in one direction, or at a bound in the other."""
        higher, lower = self._higher(), self._lower()
        self._goes_up = higher != self.limit and (self._goes_up or lower == self.limit)
        to = higher if self._goes_up else lower
        self._trial = _Trial(self.limit, rate)
        self._change(to, f"{rate:.3g} episodes/s")

    def _retreat(self, why: str) -> None:
        self._factor = _FACTOR
        self._goes_up, self._hold, self._next_hold = True, HOLD, HOLD
        self._change(self._lower(), why)

    def _higher(self) -> int:
        raised = max(self.limit + self._step, round(self.limit * self._factor))
        return min(raised, self._bounds.most)

    def _lower(self) -> int:
        lowered = min(self.limit - self._step, math.floor(self.limit / _FACTOR))
        return max(lowered, self._bounds.least)

    def _change(self, limit: int, why: str) -> None:
        if limit != self.limit:
            logger.info("concurrency %d, after %d: %s", limit, self.limit, why)
            self._ending = max(0, self.limit - limit)
            self.limit = limit


def _is_worth(more: float, gain: float) -> bool:
    return gain >= 1.0 + _WORTH * (more - 1.0)


def _is_refused(episode: Episode) -> bool:
    """Return whether the fabric or the policy's endpoint could not do what was asked of it."""
    if episode.status is EpisodeStatus.INFRA_FAILED:
        return True
    return (episode.error or "").startswith(f"{EndpointUnavailable.code}:")
