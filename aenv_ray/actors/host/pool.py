"""Which sandboxes a host keeps ready, as decisions: events in, what to start and to end out (D9).

A pool holds sandboxes that nobody called yet, all alike in whatever cannot be changed once they
run. How many it holds is what was asked for, else what the project's config says, else what recent
demand suggests. Nothing here starts, ends or waits for anything, and the time is passed in.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NewType

from aenv_ray.actors.host.warm_requests import WarmRequest
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec

PoolKey = NewType("PoolKey", str)
"""What the sandboxes of a pool have in common, as a digest: it may be logged."""

IDLE_S: Final = 1800.0
"""A pool that the project's config asks for drains when nobody created for this long."""
DEMAND_WINDOW_S: Final = 30.0
"""Demand within this counts as recent."""
LEAD_S: Final = 3.0
"""Without a request, a pool holds what recent demand creates in this time."""
MOST_BY_DEMAND: Final = 16
"""And never more than this."""
MAX_AGE_S: Final = 3600.0
"""A sandbox that nobody took for this long is replaced."""
REFILLS_PER_S: Final = 20.0
REFILL_BURST: Final = 10
"""So many starts may follow each other at once before the rate holds."""
CALM_S: Final = 0.2
"""Where plenty is left, nothing is started until nobody took one for this long: who takes one
waits for milliseconds, and each start has a core for longer than that."""
MOST_UNDER_WAY: Final = 4
"""Starts at once; one while somebody waits for an instance that no pool has."""
LONGEST_PAUSE_S: Final = 60.0
"""A pool whose sandboxes do not start tries again after 2, 4, 8 … seconds, and at most this."""


def pool_key(spec: InstanceSpec) -> PoolKey:
    """Return the pool that can serve an instance.

    TTL, idle timeout, owner and job are given to a sandbox when it is taken. The rest its code may
    have read before: its variables, its arguments, its labels (``AENV_LABELS``), its datasource.
    """
    parts = [
        spec.digest, spec.engine, sorted(spec.environment_variables.items()), spec.arguments,
        sorted(spec.labels.items()), spec.datasource,
        None if spec.changes is None else spec.changes.model_dump(),
    ]  # fmt: skip
    return PoolKey(hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def is_plain(spec: InstanceSpec) -> bool:
    """Whether the caller gave the sandbox nothing of its own."""
    own = (spec.environment_variables, spec.arguments, spec.labels, spec.datasource)
    return not any(own) and spec.changes is None


class _Demand(NamedTuple):
    """Some instances that a job created at once."""

    at: float
    instances: int
    job_id: str | None


class _Asked(NamedTuple):
    """A request and when it was made."""

    request: WarmRequest
    at: float


@dataclass
class _Pool:
    """What is known of one pool."""

    pattern: InstanceSpec
    asked: dict[str | None, _Asked] = field(default_factory=dict)
    """By the job that asked; None: whoever asked for longer than a job."""
    standing: int | None = None
    """What the project's config asks for."""
    is_slow: bool = False
    """Its engine's starts are worth anticipating."""
    recent: deque[_Demand] = field(default_factory=deque)
    jobs: set[str | None] = field(default_factory=set)
    """Who created."""
    last_demand: float = float("-inf")
    adopted_at: float = float("-inf")
    """When sandboxes of an earlier host came in, whose demand is not known."""
    ready: dict[InstanceId, float] = field(default_factory=dict)
    """Since when; oldest first."""
    under_way: int = 0
    failures: int = 0
    retry_at: float = float("-inf")

    @property
    def present(self) -> int:
        """How many there are, with what is under way."""
        return len(self.ready) + self.under_way

    def target(self, now: float) -> int:
        """Return how many there should be."""
        if self.asked:
            return sum(
                request.count
                for request, at in self.asked.values()
                if now - max(at, self.last_demand) < request.idle_timeout_s
            )
        if self.standing is not None:
            return self.standing if self.jobs and now - self.last_demand < IDLE_S else 0
        if not self.is_slow:
            return 0
        self.drop_past_demand(now)
        suggested = LEAD_S / DEMAND_WINDOW_S * sum(demand.instances for demand in self.recent)
        return min(MOST_BY_DEMAND, int(suggested))

    def can_wait(self, now: float) -> bool:
        """Whether the next start had better wait until those who take are done."""
        taken_at = self.last_demand
        is_asked_since = any(at >= taken_at for _, at in self.asked.values())
        return (
            0.0 <= now - taken_at < CALM_S
            and not is_asked_since
            and 2 * self.present >= self.target(now)
        )

    def drop_past_demand(self, now: float) -> None:
        """Forget what is not recent any more."""
        while self.recent and now - self.recent[0].at >= DEMAND_WINDOW_S:
            self.recent.popleft()

    def most(self, now: float) -> int:
        """Return how many there may be: demand that goes up and down ends nothing."""
        target = self.target(now)
        if self.asked or self.standing is not None:
            return target
        self.drop_past_demand(now)
        is_recent = self.recent or now - self.adopted_at < DEMAND_WINDOW_S
        return max(target, len(self.ready)) if is_recent else target

    def is_of_use(self, now: float) -> bool:
        """Whether anything would be lost with it."""
        return bool(
            self.asked or self.ready or self.under_way or self.target(now)
            or now < max(self.retry_at, self.last_demand + DEMAND_WINDOW_S)
        )  # fmt: skip


class Pools:
    """The pools of one host."""

    def __init__(self) -> None:
        self._pools: dict[PoolKey, _Pool] = {}
        self._tokens = float(REFILL_BURST)
        self._tokens_at: float | None = None

    # --- what is wanted -------------------------------------------------------------------------

    def ask(self, request: WarmRequest, now: float) -> PoolKey:
        """Note a request; it replaces an earlier one of the same job for the same pool.

        A request for none counts as well: what demand suggests is then not kept.
        """
        key = pool_key(request.spec)
        pool = self._pools.setdefault(key, _Pool(request.spec))
        pool.asked[request.spec.job_id] = _Asked(request, now)
        pool.retry_at, pool.failures = float("-inf"), 0
        return key

    def requests(self) -> list[WarmRequest]:
        """Return the requests that hold."""
        return [a.request for pool in self._pools.values() for a in pool.asked.values()]

    def demanded(
        self, spec: InstanceSpec, count: int, now: float, *, warm: int | None, is_slow: bool
    ) -> None:
        """Note that instances were created.

        Args:
            spec: Any of them: all are alike.
            count: How many.
            now: Seconds since the epoch.
            warm: The project's ``deployConfig.warm``.
            is_slow: Whether starts of their engine are worth anticipating.
        """
        # What one caller gave is worth keeping by demand, but not for every caller's own values.
        standing = warm if is_plain(spec) or warm == 0 else None
        key = pool_key(spec)
        pool = self._pools.get(key)
        if pool is None:
            if not (is_slow or standing):
                return
            pool = self._pools[key] = _Pool(spec)
        pool.standing, pool.is_slow, pool.last_demand = standing, is_slow, now
        pool.drop_past_demand(now)
        pool.recent.append(_Demand(now, count, spec.job_id))
        pool.jobs.add(spec.job_id)

    def forget_jobs(self, job_ids: Collection[str]) -> bool:
        """Drop the requests and the demand of jobs that ended; whether there was a request."""
        had_request = False
        for pool in self._pools.values():
            had_request |= not pool.asked.keys().isdisjoint(job_ids)
            pool.asked = {job: asked for job, asked in pool.asked.items() if job not in job_ids}
            pool.recent = deque(d for d in pool.recent if d.job_id not in job_ids)
            pool.jobs -= set(job_ids)
        return had_request

    # --- what there is --------------------------------------------------------------------------

    def pattern(self, key: PoolKey) -> InstanceSpec:
        """Return what sandboxes of a pool are made like."""
        return self._pools[key].pattern

    def missing(self, key: PoolKey, now: float) -> int:
        """Return how many are not ready yet."""
        pool = self._pools.get(key)
        return 0 if pool is None else max(0, pool.target(now) - len(pool.ready))

    def excess(self, key: PoolKey, now: float) -> int:
        """Return how many there are too many, with what is under way."""
        pool = self._pools.get(key)
        return 0 if pool is None else max(0, pool.present - pool.most(now))

    def ready(self, key: PoolKey) -> int:
        """Return how many are ready."""
        pool = self._pools.get(key)
        return 0 if pool is None else len(pool.ready)

    @property
    def size(self) -> int:
        """How many places all pools take, with what is under way."""
        return sum(pool.present for pool in self._pools.values())

    def adopted(self, spec: InstanceSpec, now: float) -> None:
        """Note a sandbox that an earlier host kept ready."""
        pool = self._pools.setdefault(pool_key(spec), _Pool(spec))
        pool.ready[spec.instance_id] = pool.adopted_at = now

    def gone(self, instance_id: InstanceId) -> None:
        """Note that a sandbox died; unknown ones do nothing."""
        for pool in self._pools.values():
            pool.ready.pop(instance_id, None)

    def take(self, key: PoolKey, count: int) -> list[InstanceId]:
        """Hand out up to `count` sandboxes, each once and never again."""
        pool = self._pools.get(key)
        return [] if pool is None else _first(pool.ready, count)

    # --- decisions ------------------------------------------------------------------------------

    def refills(self, now: float, *, room: int, is_busy: bool) -> Counter[PoolKey]:
        """Return how many to start for which pool; `refilled` must follow for each.

        Args:
            now: Seconds since the epoch.
            room: How many more the host holds.
            is_busy: Somebody waits for a start meanwhile.
        """
        passed_s = now - (now if self._tokens_at is None else self._tokens_at)
        earned = max(0.0, passed_s) * REFILLS_PER_S  # the wall clock may be set back
        self._tokens, self._tokens_at = min(float(REFILL_BURST), self._tokens + earned), now
        under_way = sum(pool.under_way for pool in self._pools.values())
        most = (1 if is_busy else MOST_UNDER_WAY) - under_way
        decided: Counter[PoolKey] = Counter()
        for _ in range(min(room, most, int(self._tokens))):
            # The emptiest first, so that one large pool does not keep a small one waiting.
            short = [
                (pool.present, key)
                for key, pool in self._pools.items()
                if pool.retry_at <= now
                and pool.present < pool.target(now)
                and not pool.can_wait(now)
            ]
            if not short:
                break
            _, key = min(short)
            self._pools[key].under_way += 1
            self._tokens -= 1
            decided[key] += 1
        return decided

    def refilled(
        self, key: PoolKey, made: Iterable[InstanceId], now: float, *, count: int, has_failed: bool
    ) -> None:
        """Note what became of starts.

        Args:
            key: The pool.
            made: What is ready now.
            now: Seconds since the epoch.
            count: How many `refills` decided.
            has_failed: One did not start: the pool pauses before the next.
        """
        pool = self._pools[key]
        pool.under_way -= count
        pool.ready |= dict.fromkeys(made, now)
        pool.failures = pool.failures + 1 if has_failed else 0
        if has_failed:
            pool.retry_at = now + min(LONGEST_PAUSE_S, 2.0**pool.failures)

    def surplus(self, now: float) -> list[InstanceId]:
        """Return those to end, too many or too old; they are handed out no more."""
        ended: list[InstanceId] = []
        for key, pool in list(self._pools.items()):
            old = sum(now - since >= MAX_AGE_S for since in pool.ready.values())
            ended += _first(pool.ready, max(old, len(pool.ready) - pool.most(now)))
            if not pool.is_of_use(now):
                del self._pools[key]
        return ended

    def give_way(self, count: int) -> list[InstanceId]:
        """Return up to `count` sandboxes to end for instances that need their places."""
        ended: list[InstanceId] = []
        # The largest pool first: it misses one the least.
        for pool in sorted(self._pools.values(), key=lambda pool: -len(pool.ready)):
            ended += _first(pool.ready, count - len(ended))
        return ended


def _first(ready: dict[InstanceId, float], count: int) -> list[InstanceId]:
    """Take out the `count` oldest."""
    chosen = list(ready)[: max(0, count)]
    for instance_id in chosen:
        del ready[instance_id]
    return chosen
