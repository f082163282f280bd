"""How often tests look at what other processes are to do."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aenv_ray.testing.looking import pause_s


def test_who_waits_longer_looks_less_often_but_every_half_second() -> None:
    pauses = [pause_s(waited_s, 0.001) for waited_s in (0.0, 0.1, 1.0, 5.0, 60.0)]
    assert all(first <= second for first, second in pairwise(pauses))
    assert pauses[0] == 0.02
    assert pauses[-1] == 0.5


@pytest.mark.parametrize("look_s", [0.001, 0.01, 0.1])
def test_looks_take_a_fifth_of_a_core_at_most(look_s: float) -> None:
    """What is waited for needs the rest of it."""
    assert look_s / (look_s + pause_s(0.0, look_s)) <= 0.2 + 1e-9


@pytest.mark.parametrize("waited_s", [1.0, 2.0, 10.0])
def test_what_comes_is_seen_soon(waited_s: float) -> None:
    assert pause_s(waited_s, 0.0) <= waited_s / 20
