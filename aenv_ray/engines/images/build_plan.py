"""What is to be built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class BuildPlan:
    """One image to build."""

    dockerfile: Path
    context: Path
    references: Sequence[str]
    """``registry/namespace/name:tag``; the same image gets all of them."""
    platform: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)
