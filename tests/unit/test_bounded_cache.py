"""The cache with limits of size and age."""

from __future__ import annotations

from aenv_ray.bounded_cache import BoundedCache
from tests.fake_clock import FakeClock


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_an_entry_expires() -> None:
    clock = FakeClock()
    cache: BoundedCache[str, int] = BoundedCache(8, ttl_s=10.0, clock=clock)
    cache.put("long", 1)
    cache.put("short", 2, expires_at=clock.now() + 5.0)
    cache.put("capped", 3, expires_at=clock.now() + 500.0)
    clock.advance(5.0)
    assert (cache.get("long"), cache.get("short"), cache.get("capped")) == (1, None, 3)
    clock.advance(5.0)
    assert (cache.get("long"), cache.get("capped"), len(cache)) == (None, None, 0)


def test_a_value_is_taken_out_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.pop("a") == 1
    assert cache.pop("a") is None
    cache.clear()
    assert len(cache) == 0


def test_values_are_limited_by_their_total_size() -> None:
    """One owner's large values do not fill the memory of a process."""
    cache: BoundedCache[str, str] = BoundedCache(10, max_bytes=100)
    for key, size in (("a", 60), ("b", 40), ("c", 50), ("huge", 101)):
        cache.put(key, key, size_bytes=size)
    assert [cache.get(key) for key in ("a", "b", "c", "huge")] == [None, "b", "c", None]
    cache.put("a", "a", size_bytes=60)
    cache.put("a", "again", size_bytes=70)
    cache.put("b", "b", size_bytes=30)
    assert (cache.get("a"), cache.get("b")) == ("again", "b")
    cache.pop("a")
    cache.put("c", "c", size_bytes=70)
    assert len(cache) == 2
    cache.clear()
    cache.put("d", "d", size_bytes=100)
    assert cache.get("d") == "d"


def test_what_is_evicted_is_told() -> None:
    """So that its resources can be freed; a value that is taken out is its taker's."""
    evicted: list[int] = []
    cache = BoundedCache[str, int](2, on_evict=evicted.append)
    for n, key in enumerate("abca"):
        cache.put(key, n)
    assert evicted == [0, 1]
    assert cache.pop("c") == 2
    cache.clear()
    assert evicted == [0, 1, 3]
