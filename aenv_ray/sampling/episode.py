"""One rollout: its task, its steps, and how it ended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.errors import FunctionFailed


class Call(BaseModel):
    """A function or reward of the environment, with its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str | None = None
    """For a setup: the function's name."""
    name: str | None = None
    """For a reward: its name; None is the default reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(BaseModel):
    """A tool call of a scripted solution."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Task(BaseModel):
    """What an episode is about. Unknown fields are kept, for the policy."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str
    instruction: str = ""
    setup: Call | None = None
    """Called before the policy; None when the task needs no preparation."""
    reward: Call | None = Field(default_factory=Call)
    """Called after the policy; None leaves the episode without a reward."""
    reference: tuple[ToolCall, ...] = ()
    """A solution that earns the full reward."""
    wrong: tuple[ToolCall, ...] = ()
    """A plausible solution that earns none."""


class Step(BaseModel):
    """One tool call of an episode."""

    model_config = ConfigDict(frozen=True)

    tool: str
    arguments: dict[str, Any]
    text: str
    """What the policy saw; the error's message when the call had no result."""
    is_error: bool
    error: str | None = None
    """Code of the error tree when the call had no result."""
    duration_s: float


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The policy ran to its end, and the reward was computed (or none was asked for)."""
    INFRA_FAILED = "infra_failed"
    """The infrastructure failed: void, and in no mean."""
    POLICY_FAILED = "policy_failed"
    """The policy raised: void, and in no mean."""
    TIMED_OUT = "timed_out"
    """The policy had not ended within `episode_timeout`: void, and in no mean."""
    REWARD_FAILED = "reward_failed"
    """Setup or reward of the environment raised, or gave no number: void, and in no mean."""


class Episode(BaseModel):
    """The record of one rollout."""

    model_config = ConfigDict(frozen=True)

    index: int
    """Its number in the sampling, from 0."""
    task_id: str
    status: EpisodeStatus
    reward: float | None
    """None unless `status` is completed."""
    reward_detail: Any = None
    """What the reward function returned."""
    steps: tuple[Step, ...] = ()
    output: Any = None
    """What the policy returned, when JSON can carry it."""
    error: str | None = None
    """What went wrong, as ``code: message``."""
    instance_id: str | None = None
    attempts: int = 1
    """1 + how often an infrastructure failure made it start anew."""
    create_s: float | None = None
    duration_s: float = 0.0


def reward_number(detail: Any) -> float:
    """Return the number in what a reward function returned.

    It is a number itself, or under ``score``, ``reward`` or ``total_reward``.

    Raises:
        FunctionFailed: There is no finite number: better no reward than a made-up one.
    """
    value = detail
    if isinstance(detail, Mapping):
        value = next((detail[k] for k in ("score", "reward", "total_reward") if k in detail), None)
    with contextlib.suppress(OverflowError):  # an int that no float holds
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
    raise FunctionFailed(
        f"the reward returned {str(detail)[:200]!r}, in which there is no number",
        hint='return a number or {"score": number}',
    )
