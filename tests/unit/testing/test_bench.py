"""How often tests check a condition that another process fulfils."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aenv_ray.testing.contract_bench import pause_s


def test_the_longer_the_wait_the_rarer_the_checks_up_to_every_half_second() -> None:
    pauses = [pause_s(waited_s, 0.001) for waited_s in (0.0, 0.1, 1.0, 5.0, 60.0)]
    assert all(first <= second for first, second in pairwise(pauses))
    assert pauses[0] == 0.02
    assert pauses[-1] == 0.5


@pytest.mark.parametrize("look_s", [0.001, 0.01, 0.1])
def test_checks_take_a_fifth_of_a_core_at_most(look_s: float) -> None:
    """The awaited process needs the rest."""
    assert look_s / (look_s + pause_s(0.0, look_s)) <= 0.2 + 1e-9


@pytest.mark.parametrize("waited_s", [1.0, 2.0, 10.0])
def test_a_fulfilled_condition_is_noticed_soon(waited_s: float) -> None:
    assert pause_s(waited_s, 0.0) <= waited_s / 20
