"""What a check of ``aenv doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"
    """It works, with less than there could be."""
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""
    """Command, or setting, that mends it."""
