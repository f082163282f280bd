"""Durations, cores and sizes as people write them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.units import MAX_TTL_S, parse_cpu_cores, parse_duration_s, parse_memory_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("30m", 1800.0),
        ("2h", 7200.0),
        ("1d", 86_400.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("45", 45.0),
        (" 5M ", 300.0),
        (90, 90.0),
        (0.5, 0.5),
        ("30d", MAX_TTL_S),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    ["", "  ", "abc", "5x", "m", "-5m", "5 m", "1h 30m", "1h30", "0", "0s", 0, -1, "31d", 1e18]
    + [math.nan, math.inf, True, False, None, [], "1e3", "²", "٣٠m5"],
)
def test_a_bad_duration_is_a_config_error_that_names_it(value: Any) -> None:
    with pytest.raises(ConfigError, match="ttl") as caught:
        parse_duration_s(value, what="ttl")
    assert repr(value) in caught.value.message
    assert caught.value.hint


@given(
    hours=st.integers(0, 200), minutes=st.integers(0, 5000), seconds=st.integers(0, 10_000)
)
def test_parts_add_up(hours: int, minutes: int, seconds: int) -> None:
    text = f"{hours}h{minutes}m{seconds}s"
    total = hours * 3600 + minutes * 60 + seconds
    if total == 0:
        with pytest.raises(ConfigError):
            parse_duration_s(text)
    else:
        assert parse_duration_s(text) == total


@given(st.text())
def test_any_text_is_a_duration_or_a_config_error(text: str) -> None:
    try:
        assert 0 < parse_duration_s(text) <= MAX_TTL_S
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("value", "cores"),
    [(2, 2.0), ("2C", 2.0), ("2c", 2.0), ("500m", 0.5), (1.5, 1.5), ("4 cores", None)]
    + [("4cores", 4.0), ("1core", 1.0), (" 2 ", 2.0), ("0.25", 0.25)],
)
def test_cores(value: str | float, cores: float | None) -> None:
    if cores is None:
        with pytest.raises(ConfigError):
            parse_cpu_cores(value)
    else:
        assert parse_cpu_cores(value) == pytest.approx(cores)


@pytest.mark.parametrize(
    "value", ["", "two", 0, "0", "0m", -1, "-1", True, "1G", None, "nan", "inf", 1e6]
)
def test_a_bad_number_of_cores_is_a_config_error_that_names_it(value: Any) -> None:
    with pytest.raises(ConfigError, match="cores") as caught:
        parse_cpu_cores(value)
    assert repr(value) in caught.value.message


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("4G", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4GB", 4 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5k", 1536),
        ("1t", 2**40),
        ("100b", 100),
        ("100", 100),
        (4096, 4096),
    ],
)
def test_sizes_both_spellings_of_a_unit_mean_the_same(value: str | int, size: int) -> None:
    assert parse_memory_bytes(value) == size


@pytest.mark.parametrize("value", ["", "lots", "0", 0, "-1G", -5, True, "1X", "1 G", None, "0.1b"])
def test_a_bad_size_is_a_config_error_that_names_it(value: Any) -> None:
    with pytest.raises(ConfigError, match="disk") as caught:
        parse_memory_bytes(value, what="disk")
    assert repr(value) in caught.value.message


@given(st.integers(1, 10**6), st.sampled_from("kmgt"))
def test_sizes_know_no_case(number: int, unit: str) -> None:
    small, large = parse_memory_bytes(f"{number}{unit}"), parse_memory_bytes(f"{number}{unit}I")
    assert small == large == parse_memory_bytes(f"{number}{unit.upper()}")


@given(st.text())
def test_any_text_is_cores_and_a_size_or_a_config_error(text: str) -> None:
    for parse in (parse_cpu_cores, parse_memory_bytes):
        try:
            assert parse(text) > 0
        except ConfigError:
            pass
