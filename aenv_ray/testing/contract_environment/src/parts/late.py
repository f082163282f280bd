"""Imported when a tool runs, not before."""

from __future__ import annotations

from .names import NAME  # noqa: TID252  # that this works is what is tested

GREETING = f"hello from {NAME}"
