"""Imported when a tool runs, not before."""

from __future__ import annotations

from .names import NAME

GREETING = f"hello from {NAME}"
