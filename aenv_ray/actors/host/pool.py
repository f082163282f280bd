"""Which warm sandboxes a host starts and ends: pure decisions.

A pool holds sandboxes that nobody has called yet and that are equal in everything that cannot be
changed once they run. Its size is the requested one, else the one in the project's config, else the
one that recent demand suggests. This module receives events with their times, and returns which
sandboxes to start and to end.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NewType

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec

PoolKey = NewType("PoolKey", str)
"""Digest of what the sandboxes of a pool have in common; safe to log."""

IDLE_S: Final = 1800.0
"""A pool that a project's config requests drains after this long without a create."""
DEMAND_WINDOW_S: Final = 30.0
"""Age up to which demand counts as recent."""
LEAD_S: Final = 3.0
"""Without a request, a pool holds what recent demand would create in this time."""
MOST_BY_DEMAND: Final = 16
"""Upper limit of a pool by demand."""
MAX_AGE_S: Final = 3600.0
"""A warm sandbox of this age is replaced."""
REFILLS_PER_S: Final = 20.0
REFILL_BURST: Final = 10
"""Starts that may follow each other at once before the rate limits them."""
CALM_S: Final = 0.2
"""A pool that is at least half full starts nothing until nobody has taken a sandbox for this long:
taking one lasts milliseconds, and each start would use a core for longer than that."""
MOST_UNDER_WAY: Final = 4
"""Concurrent starts; only one while a create waits for a start."""
MOST_REMOTE: Final = 16
"""Concurrent starts of sandboxes that start on other machines, even while a create waits."""
SLOW_S: Final = 15.0
"""A start of this age does not count for other pools: it waits, for a download or for a machine."""
LONGEST_PAUSE_S: Final = 60.0
"""A pool whose sandboxes do not start tries again after 2, 4, 8 … seconds, up to this."""


def pool_key(spec: InstanceSpec) -> PoolKey:
    """Return the key of the pool that can serve an instance.

    A sandbox gets TTL, idle timeout, owner and job when it is taken. Everything else its code may
    have read earlier: variables, arguments, labels (``AENV_LABELS``) and datasource.
    """
    parts = [
        spec.digest, spec.engine, sorted(spec.environment_variables.items()), spec.arguments,
        sorted(spec.labels.items()), spec.datasource,
        None if spec.changes is None else spec.changes.model_dump(),
    ]  # fmt: skip
    return PoolKey(hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def is_plain(spec: InstanceSpec) -> bool:
    """Whether the create sets nothing that the code of the sandbox can read."""
    own = (spec.environment_variables, spec.arguments, spec.labels, spec.datasource)
    return not any(own) and spec.changes is None


class WarmRequest(BaseModel):
    """A request to one host to keep sandboxes ready."""

    model_config = ConfigDict(frozen=True)

    spec: InstanceSpec
    """The template of the sandboxes; the request ends with its `job_id`."""
    count: int = Field(ge=0)
    idle_timeout_s: float
    """The sandboxes are ended once nobody has created one for this long."""


class _Demand(NamedTuple):
    """A group of instances that a job created."""

    at: float
    instances: int
    job_id: str | None


class _Asked(NamedTuple):
    """A request and its time."""

    request: WarmRequest
    at: float


class _Standing(NamedTuple):
    """The size that a project's config requests, as far as an owner has room, and the time."""

    size: int
    at: float


@dataclass
class _Pool:
    """The state of one pool."""

    pattern: InstanceSpec
    asked: dict[str | None, _Asked] = field(default_factory=dict)
    """Requests by job; None for detached requests."""
    standing: dict[str | None, _Standing] = field(default_factory=dict)
    """What the project's config requests by owner, since the owner's latest create."""
    is_slow: bool = False
    """Whether starts of its engine are slow enough to be anticipated."""
    recent: deque[_Demand] = field(default_factory=deque)
    jobs: set[str | None] = field(default_factory=set)
    """Jobs that created instances."""
    last_demand: float = float("-inf")
    adopted_at: float = float("-inf")
    """When sandboxes of an earlier host, whose demand is unknown, were adopted."""
    ready: dict[InstanceId, float] = field(default_factory=dict)
    """Ready sandboxes with the time since when; oldest first."""
    starts: list[float] = field(default_factory=list)
    """When each start that is under way began."""
    failures: int = 0
    retry_at: float = float("-inf")

    @property
    def present(self) -> int:
        """Number of sandboxes, including those that are starting."""
        return len(self.ready) + len(self.starts)

    def young_starts(self, now: float) -> int:
        """Return how many of its starts under way count for other pools."""
        return sum(now - began < SLOW_S for began in self.starts)

    def stand(self, owner: str | None, size: int | None, now: float) -> None:
        """Note the size that the project's config requests for an owner; None: none."""
        self.standing = {o: s for o, s in self.standing.items() if now - s.at < IDLE_S}
        self.standing.pop(owner, None)
        if size is not None:
            self.standing[owner] = _Standing(size, now)

    def standing_for(self, owner: str | None, now: float) -> int:
        """Return the size up to which the project's config keeps it filled for an owner."""
        size, at = self.standing.get(owner, (0, now))
        return size if self.jobs and now - at < IDLE_S else 0

    def target(self, now: float) -> int:
        """Return the wanted number of sandboxes."""
        if self.asked:
            return sum(
                request.count
                for request, at in self.asked.values()
                if now - max(at, self.last_demand) < request.idle_timeout_s
            )
        if self.standing:  # owners share it: any of them may take what another one's room fills
            return max(self.standing_for(owner, now) for owner in self.standing)
        if not self.is_slow:
            return 0
        self.drop_past_demand(now)
        suggested = LEAD_S / DEMAND_WINDOW_S * sum(demand.instances for demand in self.recent)
        return min(MOST_BY_DEMAND, int(suggested))

    def can_wait(self, now: float) -> bool:
        """Whether the next start should wait until creates have stopped taking sandboxes."""
        taken_at = self.last_demand
        is_asked_since = any(at >= taken_at for _, at in self.asked.values())
        return (
            0.0 <= now - taken_at < CALM_S
            and not is_asked_since
            and 2 * self.present >= self.target(now)
        )

    def drop_past_demand(self, now: float) -> None:
        """Forget demand that is no longer recent."""
        while self.recent and now - self.recent[0].at >= DEMAND_WINDOW_S:
            self.recent.popleft()

    def most(self, now: float) -> int:
        """Return the maximum number of sandboxes; those that are ready survive lower demand."""
        target = self.target(now)
        if self.asked or self.standing:
            return target
        self.drop_past_demand(now)
        is_recent = self.recent or now - self.adopted_at < DEMAND_WINDOW_S
        return max(target, len(self.ready)) if is_recent else target

    def is_of_use(self, now: float) -> bool:
        """Whether the pool has a state worth keeping."""
        return bool(
            self.asked or self.ready or self.starts or self.target(now)
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
        """Add a request; it replaces an earlier one of the same job for the same pool.

        A request for 0 counts too: the pool is then empty whatever the demand.
        """
        key = pool_key(request.spec)
        pool = self._pools.setdefault(key, _Pool(request.spec))
        pool.asked[request.spec.job_id] = _Asked(request, now)
        pool.retry_at, pool.failures = float("-inf"), 0
        return key

    def requests(self) -> list[WarmRequest]:
        """Return the valid requests."""
        return [a.request for pool in self._pools.values() for a in pool.asked.values()]

    def demanded(
        self,
        spec: InstanceSpec,
        count: int,
        now: float,
        *,
        warm: int | None,
        most: int | None,
        is_slow: bool,
    ) -> None:
        """Note that a group of instances was created.

        Args:
            spec: One of them.
            count: How many.
            now: The time.
            warm: The project's ``deployConfig.warm``.
            most: How many sandboxes the configs of all projects may keep ready for the owner, and
                the config of each project for creates without an owner. None: no limit.
            is_slow: Starts of their engine are slow enough to be anticipated.
        """
        # The config's size is for plain instances, not for each combination of variables.
        standing = warm if is_plain(spec) or warm == 0 else None
        key = pool_key(spec)
        if standing and most is not None:
            others = 0 if spec.owner is None else self._standing(spec.owner, now, but=key)
            standing = min(standing, max(0, most - others)) or None
        pool = self._pools.get(key)
        if pool is None:
            if not (is_slow or standing):
                return
            pool = self._pools[key] = _Pool(spec)
        pool.stand(spec.owner, standing, now)
        pool.is_slow, pool.last_demand = is_slow, now
        pool.drop_past_demand(now)
        pool.recent.append(_Demand(now, count, spec.job_id))
        pool.jobs.add(spec.job_id)

    def _standing(self, owner: str, now: float, *, but: PoolKey) -> int:
        """Return the size of the other pools that configs keep filled for an owner."""
        pools = [pool for key, pool in self._pools.items() if key != but]
        return sum(pool.standing_for(owner, now) for pool in pools)

    def forget_jobs(self, job_ids: Collection[str]) -> bool:
        """Drop the requests and the demand of ended jobs; return whether there was a request."""
        had_request = False
        for pool in self._pools.values():
            had_request |= not pool.asked.keys().isdisjoint(job_ids)
            pool.asked = {job: asked for job, asked in pool.asked.items() if job not in job_ids}
            pool.recent = deque(d for d in pool.recent if d.job_id not in job_ids)
            pool.jobs -= set(job_ids)
        return had_request

    # --- what there is --------------------------------------------------------------------------

    def pattern(self, key: PoolKey) -> InstanceSpec:
        """Return the spec on which the sandboxes of a pool are modelled."""
        return self._pools[key].pattern

    def missing(self, key: PoolKey, now: float) -> int:
        """Return how many sandboxes are missing."""
        pool = self._pools.get(key)
        return 0 if pool is None else max(0, pool.target(now) - len(pool.ready))

    def excess(self, key: PoolKey, now: float) -> int:
        """Return how many sandboxes are superfluous, including those that are starting."""
        pool = self._pools.get(key)
        return 0 if pool is None else max(0, pool.present - pool.most(now))

    def ready(self, key: PoolKey) -> int:
        """Return how many sandboxes are ready."""
        pool = self._pools.get(key)
        return 0 if pool is None else len(pool.ready)

    @property
    def size(self) -> int:
        """Number of sandboxes of all pools, including those that are starting."""
        return sum(pool.present for pool in self._pools.values())

    def adopted(self, spec: InstanceSpec, now: float) -> None:
        """Add a warm sandbox of an earlier host."""
        pool = self._pools.setdefault(pool_key(spec), _Pool(spec))
        pool.ready[spec.instance_id] = pool.adopted_at = now

    def gone(self, instance_id: InstanceId) -> None:
        """Remove a sandbox that died; unknown ids are ignored."""
        for pool in self._pools.values():
            pool.ready.pop(instance_id, None)

    def take(self, key: PoolKey, count: int) -> list[InstanceId]:
        """Remove and return up to `count` sandboxes."""
        pool = self._pools.get(key)
        return [] if pool is None else _first(pool.ready, count)

    # --- decisions ------------------------------------------------------------------------------

    def refills(
        self, now: float, *, room: int, is_busy: bool, remote_engines: Collection[str] = ()
    ) -> Counter[PoolKey]:
        """Return how many sandboxes to start for each pool; call `refilled` after each.

        Args:
            now: The time.
            room: Number of free slots of the host.
            is_busy: Whether a create waits for a start.
            remote_engines: The engines whose sandboxes start on other machines.
        """
        passed_s = now - (now if self._tokens_at is None else self._tokens_at)
        earned = max(0.0, passed_s) * REFILLS_PER_S  # the clock may be set back
        self._tokens, self._tokens_at = min(float(REFILL_BURST), self._tokens + earned), now
        most = {False: MOST_UNDER_WAY, True: MOST_REMOTE}
        left = {False: 1 if is_busy else MOST_UNDER_WAY, True: MOST_REMOTE}
        for pool in self._pools.values():
            left[pool.pattern.engine in remote_engines] -= pool.young_starts(now)
        decided: Counter[PoolKey] = Counter()
        for _ in range(min(room, int(self._tokens))):
            # The emptiest pool first, so that a large one does not hold up a small one.
            short = [
                (pool.present, key)
                for key, pool in self._pools.items()
                if pool.retry_at <= now
                and left[pool.pattern.engine in remote_engines] > 0
                and len(pool.starts) < most[pool.pattern.engine in remote_engines]
                and pool.present < pool.target(now)
                and not pool.can_wait(now)
            ]
            if not short:
                break
            _, key = min(short)
            self._pools[key].starts.append(now)
            left[self._pools[key].pattern.engine in remote_engines] -= 1
            self._tokens -= 1
            decided[key] += 1
        return decided

    def refilled(
        self,
        key: PoolKey,
        made: Iterable[InstanceId],
        now: float,
        *,
        began: float,
        count: int,
        has_failed: bool,
    ) -> None:
        """Note the result of starts.

        `began` is the time at which `refills` decided them, and `count` their number; `has_failed`:
        one did not start, and the pool pauses.
        """
        pool = self._pools[key]
        for _ in range(count):  # older ones may still be under way
            pool.starts.remove(began)
        pool.ready |= dict.fromkeys(made, now)
        pool.failures = pool.failures + 1 if has_failed else 0
        if has_failed:
            pool.retry_at = now + min(LONGEST_PAUSE_S, 2.0**pool.failures)

    def surplus(self, now: float) -> list[InstanceId]:
        """Remove and return superfluous and too old sandboxes, which are to be ended."""
        ended: list[InstanceId] = []
        for key, pool in list(self._pools.items()):
            old = sum(now - since >= MAX_AGE_S for since in pool.ready.values())
            ended += _first(pool.ready, max(old, len(pool.ready) - pool.most(now)))
            if not pool.is_of_use(now):
                del self._pools[key]
        return ended

    def give_way(self, count: int) -> list[InstanceId]:
        """Remove and return up to `count` sandboxes whose slots instances need."""
        ended: list[InstanceId] = []
        # From the largest pool first, which suffers least.
        for pool in sorted(self._pools.values(), key=lambda pool: -len(pool.ready)):
            ended += _first(pool.ready, count - len(ended))
        return ended


def _first(ready: dict[InstanceId, float], count: int) -> list[InstanceId]:
    """Remove and return the `count` oldest."""
    chosen = list(ready)[: max(0, count)]
    for instance_id in chosen:
        del ready[instance_id]
    return chosen
