"""Runtime kits are created once per node, under a lock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aenv_ray.engines.images import runtime_kit
from aenv_ray.engines.images.runtime_kit import ImagePython
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.files import FileLock

PYTHON = ImagePython((3, 99), "tests", "glibc")


async def ensure(directory: Path) -> Path:
    async def compile_in(kit: Path) -> None:
        raise AssertionError("the kit was not to be created")

    return await runtime_kit.ensure(PYTHON, directory, compile_in)


def lock_path(directory: Path) -> Path:
    target = directory / f"{PYTHON}-{runtime_kit.fingerprint()}"
    return target.with_suffix(".lock")


async def test_cancelling_the_wait_for_the_lock_leaves_it_free(tmp_path: Path) -> None:
    """Invariant 11."""
    with FileLock.acquire(lock_path(tmp_path), 1.0):
        waiting = asyncio.create_task(ensure(tmp_path))
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.cancel()
        await asyncio.wait([waiting])
    FileLock.acquire(lock_path(tmp_path), 0.0).close()


async def test_a_lock_that_is_never_released_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(runtime_kit, "_LOCK_DEADLINE_S", 0.05)
    with (
        FileLock.acquire(lock_path(tmp_path), 1.0),
        pytest.raises(SandboxStartFailed, match="runtime for containers is not ready"),
    ):
        await ensure(tmp_path)
