"""Durations, cores and sizes as people write them."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.errors import ConfigError
from aenv_ray.units import MAX_TTL_S, parse_cpu_cores, parse_duration_s, parse_memory_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86_400), ("1h30m", 5400), (" 5M ", 300),
        ("1.5h", 5400), ("500ms", 0.5), ("60", 60), (60, 60), (0.25, 0.25), ("30d", MAX_TTL_S),
    ],
)  # fmt: skip
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "m", "30 m", "30min", "-5m", "0", "0s", 0, -1, "1h-30m", "1,5h", "inf", "nan",
        math.inf, math.nan, True, False, "31d", 1e12, "5x", "h5", "1h 30m", "٣m", "²", "1e3",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_its_own_words(value: str | float) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_duration_s(value, what="ttl")
    assert raised.value.message.startswith(f"ttl {value!r}")
    assert raised.value.hint


@given(st.integers(1, 29), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_parts_of_a_duration_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_duration_s(f"{days}d{hours}h{minutes}m{seconds}s") == total
    assert parse_duration_s(total) == parse_duration_s(str(total)) == total


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_anything_is_a_duration_or_a_typed_refusal(value: str | float) -> None:
    with contextlib.suppress(ConfigError):
        assert 0 < parse_duration_s(value) <= MAX_TTL_S


@pytest.mark.parametrize(
    ("text", "cores"), [("2", 2), ("2C", 2), ("500m", 0.5), (1.5, 1.5), ("0.5core", 0.5), (4, 4)]
)
def test_cores(text: str | float, cores: float) -> None:
    assert parse_cpu_cores(text) == cores


@pytest.mark.parametrize("value", ["", "0", "0m", "-1", "two", "2 C", True, 1e6, "1Ci", math.nan])
def test_what_is_no_number_of_cores_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match="cpu"):
        parse_cpu_cores(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4G", 4 << 30), ("4Gi", 4 << 30), ("4GB", 4 << 30), ("512M", 512 << 20), ("1k", 1024),
        ("1.5g", 3 << 29), (1024, 1024), ("2T", 2 << 40), ("10b", 10), ("10", 10),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_memory_bytes(text) == size


@pytest.mark.parametrize("value", ["", "0", "-1G", "4 G", "G", True, "4Q", "4Gib", 0, 0.4])
def test_what_is_no_size_is_refused(value: str | float) -> None:
    with pytest.raises(ConfigError, match="storage"):
        parse_memory_bytes(value, what="storage")


@given(st.integers(1, 1 << 50), st.sampled_from(["", "k", "Ki", "m", "MB", "g", "Gi", "t"]))
def test_both_forms_of_a_unit_are_powers_of_1024(number: int, unit: str) -> None:
    power = "kmgt".find(unit[:1].lower()) + 1 if unit else 0
    assert parse_memory_bytes(f"{number}{unit}") == pytest.approx(number * 1024**power)
