"""Counts the functions that run; lets none begin during a reset, and none of an agent in a reward.

A sidecar and an inner instance are also closed to the agent by the reward of the outer instance,
whose own calls there must run. So a request of the outer instance says how many rewards had begun
there before the tool call that makes it (`OUTER_REWARDS`): one from before the last reward is late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from aenv_ray.runtime.door.calls import RunningCall
from aenv_ray.runtime.door.host.link import OUTER_REWARDS
from aenv_ray.runtime.faults import Fault


class CallRefused(Fault):
    """A call of an agent that did not run, because of a reward; it may run later."""

    def __init__(self, name: str) -> None:
        super().__init__(
            "call_cancelled",
            f"{name!r} did not run: a reward of the instance is under way",
            "call tools before the reward or after it; with keep_processes=True a reward lets them "
            "run",
            tool_name=name,
        )


class CallGate:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running: dict[int, RunningCall] = {}
        self._is_closed = False
        self._is_awaited = False
        self._rewards: set[str] = set()
        """Keys of the rewards under way that let no agent act."""
        self._outer_rewards = 0
        """Tool calls of the outer instance that began before so many of its rewards are late."""
        self._held_until = 0.0
        """Until then a reward of the outer instance lets no caller from elsewhere act."""
        self.generation = 0
        """How often the gate was closed to the agent."""
        self._episode = 0
        """Calls of the agent from before this generation belong to an episode that is over."""
        self.was_used = False
        """Whether a call may have started something since the start of the instance."""
        self.refusal = ""
        """Why the instance is not usable after a reset; empty if it is."""

    def enter(self, call: RunningCall) -> None:
        """Count a function that is about to run; `leave` follows.

        Raises:
            Fault: ``call_cancelled``: the instance is being reset, or was since `admit`; the
                function must not run.
            CallRefused: A reward has begun since `admit`.
        """
        with self._changed:
            if id(call) in self._running:
                return  # its first part has run
            generation = call.generation
            if self._is_closed or (generation is not None and generation < self._episode):
                raise Fault(
                    "call_cancelled",
                    f"{call.name!r} did not run: the instance is being reset",
                    "make calls of the next episode after the reset",
                    tool_name=call.name,
                )
            if generation is not None and generation != self.generation:
                raise CallRefused(call.name)
            self._running[id(call)] = call

    def leave(self, call: RunningCall) -> None:
        """Note that a function has ended; does nothing if it never entered."""
        with self._changed:
            self._running.pop(id(call), None)
            if self._is_closed or self._is_awaited:
                self._changed.notify_all()

    def close(self) -> bool:
        """Let no function begin; False if the gate is closed already."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self.generation += 1  # what calls of the last episode have left is late from now on
                self._episode = self.generation
            return not was_closed

    def open(self) -> None:
        """Let functions begin again."""
        with self._changed:
            self._is_closed = False

    def wait_empty(self, within_s: float) -> list[str]:
        """Wait until no function runs; return the names of those that still do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, within_s)
            return sorted(call.name for call in self._running.values())

    # --- the agent and rewards ------------------------------------------------------------------

    def admit(self, name: str, meta: Mapping[str, Any], *, is_reward: bool = False) -> int:
        """Return the generation for a call of an agent, which `enter` compares.

        Args:
            name: The tool, for the error.
            meta: ``_meta`` of the call.
            is_reward: It is a reward, which other rewards of this instance let run.

        Raises:
            CallRefused: A reward is under way.
        """
        generation = self.generation  # before the check: a later reward must change it
        if generation and self._is_closed_to(meta.get(OUTER_REWARDS), is_reward):
            raise CallRefused(name)
        return generation

    def _is_closed_to(self, outer_rewards: int | None, is_reward: bool) -> bool:
        if self._rewards and not is_reward:
            return True
        if outer_rewards is None:
            return time.monotonic() < self._held_until
        return 0 <= outer_rewards < self._outer_rewards

    def begin_reward(self, key: str) -> int:
        """Let no call of an agent begin until `end_reward`, which must follow.

        Returns:
            The generation that the reward has begun, or joined.
        """
        with self._changed:
            is_first = not self._rewards
            self._rewards.add(key)
            # Last: `admit`, which takes no lock, must not see a later generation than the rest.
            self.generation += is_first
            return self.generation

    def end_reward(self, key: str) -> int | None:
        """Note that a reward has its outcome.

        Returns:
            The generation, if this reward was the last that kept the gate closed.
        """
        with self._changed:
            was_under_way = key in self._rewards
            self._rewards.discard(key)
            return self.generation if was_under_way and not self.is_held else None

    def hold(self, outer_rewards: int, held_s: float) -> None:
        """Close the gate to the agent for a reward of the outer instance, see `OUTER_REWARDS`.

        Args:
            outer_rewards: How many rewards have begun there, with this one.
            held_s: How long to refuse callers from elsewhere, unless `release` comes earlier.
        """
        with self._changed:
            self._outer_rewards = max(self._outer_rewards, outer_rewards)
            self._held_until = time.monotonic() + held_s
            self.generation += 1  # last, as in `begin_reward`

    @property
    def is_held(self) -> bool:
        """Whether a reward of this instance, or of the outer one, is under way."""
        return bool(self._rewards) or self.held_s > 0

    @property
    def held_s(self) -> float:
        """How much longer callers from elsewhere are refused."""
        return max(0.0, self._held_until - time.monotonic())

    def release(self, outer_rewards: int) -> int | None:
        """End what `hold` began, unless a later reward has called it again.

        Returns:
            The generation, if nothing keeps the gate closed any more.
        """
        with self._changed:
            if outer_rewards >= self._outer_rewards:
                self._held_until = 0.0
            return None if self.is_held else self.generation

    def wait_for_agent(self, within_s: float) -> bool:
        """Wait until no call of an agent runs; return whether one ran."""
        with self._changed:
            if not self._runs_for_agent():
                return False
            self._is_awaited = True
            self._changed.wait_for(lambda: not self._runs_for_agent(), within_s)
            self._is_awaited = False
            return True

    def _runs_for_agent(self) -> bool:
        return any(call.generation is not None for call in self._running.values())
