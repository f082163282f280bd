"""Durations, CPU and memory as text, in config files and options."""

from __future__ import annotations

import math
import re

from aenv_ray.errors import ConfigError

DEFAULT_TTL_S = 30 * 60.0
"""Default TTL of an instance, as in AEnvironment."""

MAX_TTL_S = 30 * 86_400.0
"""Maximum duration; a larger value is probably a wrong unit."""

_DURATION_PART = re.compile(r"(\d++(?:\.\d++)?)(ms|s|m|h|d)", re.ASCII)
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})++", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_CPU = re.compile(r"(\d+(?:\.\d+)?)(m|c|core|cores)?", re.IGNORECASE | re.ASCII)
_MEMORY = re.compile(
    r"(\d{1,18}(?:\.\d+)?)(b|k|ki|kb|m|mi|mb|g|gi|gb|t|ti|tb)?", re.IGNORECASE | re.ASCII
)
_BYTES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_duration_s(value: str | float, *, what: str = "duration") -> float:
    """Return the number of seconds in ``90s``, ``30m``, ``2h``, ``1d``, ``1h30m`` or a number.

    Raises:
        ConfigError: The value is malformed, not above zero, or over `MAX_TTL_S`.
    """
    hint = "write it as 90s, 30m, 2h, 1d or 1h30m"
    if isinstance(value, bool):
        raise ConfigError(f"{what} {value!r} is not a duration", hint=hint)
    if isinstance(value, int | float):
        seconds = float(value) if value <= MAX_TTL_S else math.inf
    elif not isinstance(value, str):
        raise ConfigError(f"{what} {value!r} is not a duration", hint=hint)
    else:
        text = value.strip().lower()
        if text.isdecimal():
            seconds = float(text)
        elif _DURATION.fullmatch(text):  # a search through other text takes quadratic time
            parts = _DURATION_PART.findall(text)
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        else:
            raise ConfigError(f"{what} {value!r} is not a duration", hint=hint)
    if not math.isfinite(seconds) or seconds <= 0 or seconds > MAX_TTL_S:
        raise ConfigError(f"{what} {value!r} must be more than 0 and at most 30 days", hint=hint)
    return seconds


def parse_cpu_cores(value: str | float) -> float:
    """Return the number of cores in ``2``, ``"2C"``, ``"500m"`` or ``1.5``.

    Raises:
        ConfigError: The value is malformed or not above zero.
    """
    match = None if isinstance(value, bool) else _CPU.fullmatch(str(value).strip())
    cores = 0.0
    if match:
        cores = float(match[1]) / (1000 if match[2] == "m" else 1)
    if not 0 < cores < 1e5:
        raise ConfigError(
            f"cpu {value!r} is not a number of cores", hint='write it as "2", "2C" or "500m"'
        )
    return cores


def parse_memory_bytes(value: str | float, *, what: str = "memory") -> int:
    """Return the number of bytes in ``"4G"``, ``"4Gi"``, ``"512M"`` or a number.

    Units are powers of 1024 in both notations: existing projects write ``2G`` for ``2Gi``.

    Raises:
        ConfigError: The value is malformed or not above zero.
    """
    match = None if isinstance(value, bool) else _MEMORY.fullmatch(str(value).strip())
    size = 0
    if match:
        size = int(float(match[1]) * _BYTES[(match[2] or "")[:1].lower()])
    if size <= 0:
        raise ConfigError(
            f"{what} {value!r} is not a size", hint='write it as "512M", "4G" or "4Gi"'
        )
    return size


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as ``1 instance`` or ``3 instances``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
