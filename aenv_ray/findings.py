"""Findings of ``aenv doctor``, ``aenv cluster doctor`` and ``aenv test --check``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    """It works with less than there could be, or could not be looked at."""
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""
    """Command, or setting, that mends it."""
