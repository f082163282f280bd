"""A cache with a size limit and, optionally, an age limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from aenv_ray.clock import Clock, SystemClock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """At most `max_entries` values by key; the least recently used ones are evicted first.

    Args:
        max_entries: At least 1.
        ttl_s: How long a value is kept after `put`, in seconds; None keeps it until it is evicted.
        clock: For `ttl_s` and `expires_at`.
        on_evict: Called with the key and value of each evicted or expired entry, and not for those
            that `pop` or `clear` take out.

    Not thread-safe: use it on one event loop, or under a lock.
    """

    def __init__(
        self,
        max_entries: int,
        *,
        ttl_s: float | None = None,
        clock: Clock | None = None,
        on_evict: Callable[[K, V], object] | None = None,
    ) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._on_evict = on_evict
        self._entries: OrderedDict[K, tuple[float | None, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if there is none, or if it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires_at, value = entry
        if expires_at is not None and expires_at <= self._clock.now():
            self._evict(key)
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V, *, expires_at: float | None = None) -> None:
        """Set the value of a key.

        Args:
            key: An earlier value of it is replaced.
            value: None cannot be told apart from a missing value.
            expires_at: In seconds since the epoch; it can only shorten `ttl_s`.
        """
        limits = [] if expires_at is None else [expires_at]
        if self._ttl_s is not None:
            limits.append(self._clock.now() + self._ttl_s)
        self._entries[key] = (min(limits, default=None), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._evict(next(iter(self._entries)))

    def pop(self, key: K) -> V | None:
        """Take out a key and return its value, expired or not; None if there is none."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Take out everything."""
        self._entries.clear()

    def _evict(self, key: K) -> None:
        _, value = self._entries.pop(key)
        if self._on_evict is not None:
            self._on_evict(key, value)
