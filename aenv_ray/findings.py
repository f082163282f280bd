"""Findings of ``aenv doctor``, ``aenv cluster doctor`` and ``aenv test --check``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    """It works with restrictions, or could not be checked."""
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""
    """A command or setting that corrects it."""
