"""Unit tests start nothing: what would start a cluster or a launcher raises here."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class StartedSomething(AssertionError):
    """A unit test tried to start what takes more than a moment."""


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen.__init__

    def guarded_popen(self: Any, args: Any, *more: Any, **options: Any) -> None:
        words = args if isinstance(args, str) else " ".join(map(str, args))
        if "aenv_ray.engines.process.launcher" in words or "raylet" in words:
            raise StartedSomething(f"a unit test starts nothing, but: {words}")
        popen(self, args, *more, **options)

    async def guarded_exec(program: str, *arguments: str, **_: Any) -> None:
        raise StartedSomething(f"a unit test starts nothing, but: {program} {arguments}")

    monkeypatch.setattr(subprocess.Popen, "__init__", guarded_popen)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", guarded_exec)
    if "ray" in sys.modules:

        def guarded_init(*_: Any, **__: Any) -> None:
            raise StartedSomething("a unit test starts no Ray")

        monkeypatch.setattr(sys.modules["ray"], "init", guarded_init)


@pytest.fixture
def full_disk() -> Iterator[Callable[[int | None], None]]:
    """Limits how large a file may become; a write beyond that fails, after a part of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int | None) -> None:
        soft = before[0] if size_bytes is None else size_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)
