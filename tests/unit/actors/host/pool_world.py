"""Pools with a clock, and engines that start everything at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as numbers
from typing import Any

import pytest

from aenv_ray.actors.host.pool import PoolKey, Pools, WarmRequest
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec
from tests.fake_clock import FakeClock

ROOM = 10_000


def spec(**fields: Any) -> InstanceSpec:
    values: dict[str, Any] = {
        "instance_id": InstanceId("env-1"), "reference": "env@1.0.0", "digest": "d", "ttl_s": 60.0,
        "job_id": "j1",
    }  # fmt: skip
    return InstanceSpec(**{**values, **fields})


class World:
    """Pools, a clock, and engines that start everything at once."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.clock = FakeClock()
        self.started: list[InstanceId] = []
        self._ids: Iterator[int] = numbers()

    def ask(self, count: int, idle_timeout_s: float = 600.0, **fields: Any) -> PoolKey:
        request = WarmRequest(spec=spec(**fields), count=count, idle_timeout_s=idle_timeout_s)
        return self.pools.ask(request, self.clock.now())

    def demand(
        self,
        count: int,
        warm: int | None = None,
        *,
        slow: bool = True,
        most: int | None = None,
        **fields: Any,
    ) -> None:
        self.pools.demanded(
            spec(**fields), count, self.clock.now(), warm=warm, most=most, is_slow=slow
        )

    def refill(self, room: int = ROOM, *, is_busy: bool = False, fails: bool = False) -> int:
        """Start what is decided now, once; return how many."""
        now = self.clock.now()
        decided = self.pools.refills(now, room=room, is_busy=is_busy)
        for key, count in decided.items():
            made = [] if fails else [InstanceId(f"env-{next(self._ids)}") for _ in range(count)]
            self.started += made
            self.pools.refilled(key, made, now, began=now, count=count, has_failed=fails)
        return decided.total()

    def settle(self, seconds: float = 60.0) -> list[InstanceId]:
        """Let time pass as a host does; return what was ended."""
        ended: list[InstanceId] = []
        for _ in range(int(seconds / 0.5)):
            ended += self.pools.surplus(self.clock.now())
            while self.refill():
                pass
            self.clock.advance(0.5)
        return ended


@pytest.fixture
def world() -> World:
    return World()
