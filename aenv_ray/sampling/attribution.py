"""Decides which episodes without a result count, and with what reward.

An agent must not be able to leave the mean by ending an episode that it is losing (invariant 14),
and a failure of the infrastructure must not become a reward (invariant 2). So an episode counts if
the agent, or its actions in the sandbox, may be the reason why there is no result. If in doubt, the
episode counts; its status distinguishes it from an episode with a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    ConversationRefused,
    DeadlineExceeded,
    InstanceExpired,
    SandboxDiedInside,
    SandboxExhausted,
    ToolError,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from aenv_ray.trajectories.schema import EpisodeStatus

SANDBOX_SHARE: Final = 0.1
"""An episode that ran out of time counts if its calls to the sandbox took this share of the time or
more. Otherwise the policy alone was slow, for example its model."""


class Stage(Enum):
    """What an episode was doing."""

    SETUP = "setup"
    POLICY = "policy"
    REWARD = "reward"
    GRADER = "grader"
    """A reward on an instance of its own, whose argument `SUBMITTED` the agent has chosen."""


SUBMITTED: Final = "submission"
"""The argument of a reward with what the agent submits."""


class CallClock:
    """Measures for how long at least one call to the sandbox was under way.

    The time during which the event loop was blocked does not count: the sandbox may have answered.
    Each method is given the time, in seconds.

    Args:
        blocked_s: Returns how long the loop was blocked in sum, until the given time.
    """

    def __init__(self, blocked_s: Callable[[float], float] = lambda _: 0.0) -> None:
        self._blocked_s = blocked_s
        self._running = 0
        self._since = 0.0
        self._blocked_before_s = 0.0
        self._busy_s = 0.0
        self.has_acted = False
        """Whether there was a call."""

    def begin(self, now: float) -> None:
        """Note the beginning of a call."""
        if not self._running:
            self._since = now
            self._blocked_before_s = self._blocked_s(now)
        self._running += 1
        self.has_acted = True

    def end(self, now: float) -> None:
        """Note the end of a call."""
        self._running -= 1
        if not self._running:
            self._busy_s += self._span_s(now)

    def busy_s(self, now: float) -> float:
        """Return the seconds with a call under way, until now."""
        return self._busy_s + (self._span_s(now) if self._running else 0.0)

    def _span_s(self, now: float) -> float:
        """Return how long calls have been under way without a pause, less what was blocked."""
        blocked_s = self._blocked_s(now) - self._blocked_before_s
        return max(0.0, now - self._since - blocked_s)


@dataclass(frozen=True)
class PolicyActivity:
    """What the policy did before its episode failed."""

    has_acted: bool
    """Whether it made a call that acts in the sandbox."""
    busy_s: float
    """Seconds with such a call under way, while the event loop was not blocked."""
    duration_s: float
    """Seconds that the policy took, without setup and reward."""

    @property
    def is_slow_by_sandbox(self) -> bool:
        """Whether the calls can have kept the policy from ending in time."""
        return self.has_acted and self.busy_s >= SANDBOX_SHARE * self.duration_s


NO_ACTIVITY: Final = PolicyActivity(has_acted=False, busy_s=0.0, duration_s=0.0)


@dataclass(frozen=True)
class FailedEnd:
    """How an episode without a result ended."""

    status: EpisodeStatus
    reward: float | None
    """None: it is void."""


@dataclass(frozen=True)
class FailureRewards:
    """Rewards of episodes that the agent can have kept from their result.

    Raises:
        ConfigError: A reward is not a finite number.
    """

    on_death: float = 0.0
    """Something in the sandbox ended it, kept the reward from running, or kept the sandbox from
    answering."""
    on_timeout: float | None = 0.0
    """Calls to the sandbox took so long that the policy did not end in time. None: void."""
    on_failure: float | None = 0.0
    """The reward raised after the agent had acted, a tool call of the policy raised an error that
    it did not handle, or its model failed at the results of calls. None: void."""

    def __post_init__(self) -> None:
        for name in ("on_death", "on_timeout", "on_failure"):
            value = getattr(self, name)
            if not (_is_finite(value) or (value is None and name != "on_death")):
                raise ConfigError(
                    f"reward_{name} must be a finite number, not {value!r}",
                    hint="pass a number; on_timeout and on_failure may be None for void episodes",
                )

    def end_of(
        self, exc: Exception, stage: Stage, activity: PolicyActivity = NO_ACTIVITY
    ) -> FailedEnd:
        """Return how an episode ended.

        Args:
            exc: What ended it: not a failure of the infrastructure. `CallOutcomeUnknown` means that
                the sandbox runs and did not answer, `DeadlineExceeded` that the policy had no time
                left.
            stage: Where it was raised.
            activity: What the policy did.
        """
        match exc:
            case SandboxDiedInside() | SandboxExhausted() | CallOutcomeUnknown():
                return FailedEnd(EpisodeStatus.DIED_INSIDE, self.on_death)
            case InstanceExpired() | DeadlineExceeded():
                reward = self.on_timeout if activity.is_slow_by_sandbox else None
                return FailedEnd(EpisodeStatus.TIMED_OUT, reward)
        match stage:
            case Stage.SETUP:
                return FailedEnd(EpisodeStatus.REWARD_FAILED, None)
            case Stage.POLICY if isinstance(exc, ToolTimeout):
                return FailedEnd(EpisodeStatus.TIMED_OUT, self.on_timeout)
            case Stage.POLICY:
                is_outcome = isinstance(exc, ToolError | ConversationRefused)
                reward = self.on_failure if is_outcome else None
                return FailedEnd(EpisodeStatus.POLICY_FAILED, reward)
            case Stage.REWARD | Stage.GRADER:
                # What a task asks for is checked before code runs that an agent can influence.
                is_task = isinstance(exc, ToolNotFound)
                if isinstance(exc, ToolInputInvalid):
                    # An agent can also submit what is too large, or cannot be read.
                    is_agent = stage is Stage.GRADER and exc.argument in (SUBMITTED, None)
                    is_task = not is_agent
                reward = self.on_failure if activity.has_acted and not is_task else None
                return FailedEnd(EpisodeStatus.REWARD_FAILED, reward)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
