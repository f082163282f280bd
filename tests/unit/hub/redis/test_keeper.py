"""How long the bundled Redis outlives those who use it."""

from __future__ import annotations

from aenv_ray.hub.redis.keeper import HURRY_S, Use


def test_a_redis_waits_for_its_hub_to_come_back() -> None:
    use = Use(linger_s=5.0)
    assert not use.is_over(0.0, is_used=True)
    assert not use.is_over(100.0, is_used=False)
    assert not use.is_over(104.9, is_used=False)
    assert not use.is_over(105.0, is_used=True)
    assert not use.is_over(106.0, is_used=False)
    assert use.is_over(111.0, is_used=False)


def test_it_stops_at_once_when_its_last_user_ends() -> None:
    """Also if another process looks at the lock just now."""
    use = Use(linger_s=5.0)
    use.hurry(100.0)
    assert not use.is_over(100.1, is_used=True)
    assert use.is_over(100.0 + HURRY_S / 2, is_used=False)


def test_a_user_that_left_earlier_hurries_nobody() -> None:
    """A backup ends while the hub runs on; days later the hub is killed, and restarted."""
    use = Use(linger_s=5.0)
    use.hurry(100.0)
    assert not use.is_over(100.1, is_used=True)
    assert not use.is_over(500.0, is_used=False)
    assert use.is_over(505.0, is_used=False)
