"""A cache with limits of its entries and, optionally, of their size and age."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from aenv_ray.clock import Clock, SystemClock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    expires_at: float | None
    value: V
    size_bytes: int


class BoundedCache(Generic[K, V]):
    """At most `max_entries` values by key; the least recently used ones are evicted first.

    Args:
        max_entries: At least 1.
        ttl_s: How long a value is kept after `put`, in seconds; None keeps it until it is evicted.
        clock: For `ttl_s` and `expires_at`.
        max_bytes: Limit for the total size of the values, as given to `put`; a larger value is not
            kept. None: no limit.
        on_evict: Called with each value that `clear` or one of the two limits evicts.

    Not thread-safe: use it on one event loop, or under a lock.
    """

    def __init__(
        self,
        max_entries: int,
        *,
        ttl_s: float | None = None,
        clock: Clock | None = None,
        max_bytes: int | None = None,
        on_evict: Callable[[V], None] = lambda _: None,
    ) -> None:
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._max_bytes = max_bytes
        self._on_evict = on_evict
        self._bytes = 0
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if there is none, or if it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at is not None and entry.expires_at <= self._clock.now():
            self.pop(key)
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(
        self, key: K, value: V, *, expires_at: float | None = None, size_bytes: int = 0
    ) -> None:
        """Set the value of a key.

        Args:
            key: An earlier value of it is replaced.
            value: None cannot be told apart from a missing value.
            expires_at: When it expires, in seconds since the epoch; can only shorten `ttl_s`.
            size_bytes: The size of the value, for `max_bytes`.
        """
        limits = [] if expires_at is None else [expires_at]
        if self._ttl_s is not None:
            limits.append(self._clock.now() + self._ttl_s)
        self.pop(key)
        if self._max_bytes is not None and size_bytes > self._max_bytes:
            return  # the others stay
        self._entries[key] = _Entry(min(limits, default=None), value, size_bytes)
        self._bytes += size_bytes
        while len(self._entries) > self._max_entries or self._is_too_large():
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._bytes -= entry.size_bytes
        self._on_evict(entry.value)

    def _is_too_large(self) -> bool:
        return self._max_bytes is not None and self._bytes > self._max_bytes

    def pop(self, key: K) -> V | None:
        """Take out a key and return its value, expired or not; None if there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._bytes -= entry.size_bytes
        return entry.value

    def clear(self) -> None:
        """Take out everything."""
        while self._entries:
            self._evict_oldest()
