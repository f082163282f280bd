"""How a soak tells growth from noise."""

from __future__ import annotations

import pytest

from benchmarks.soak import WARM_UP, leaks, slope

FLAT = [100.0] * 10


def test_an_outlier_is_no_slope() -> None:
    assert slope([5.0, 5.0, 90.0, 5.0, 5.0, 5.0]) == 0.0
    assert slope([0.0, 2.0, 4.0, 90.0, 8.0, 10.0]) == 2.0


@pytest.mark.parametrize("name", ["memory of the actors", "descriptors", "processes", "keys"])
def test_a_curve_that_grows_is_a_leak(name: str) -> None:
    grown = leaks({name: [100.0 + 10.0 * number for number in range(10)], "keys of all": FLAT})
    assert grown == {name: 40.0}


def test_growth_while_it_warms_up_is_no_leak() -> None:
    assert leaks({"processes": [10.0 * number for number in range(WARM_UP)] + FLAT}) == {}


def test_shrinking_is_no_leak() -> None:
    assert leaks({"descriptors": [100.0 - 5.0 * number for number in range(10)]}) == {}
