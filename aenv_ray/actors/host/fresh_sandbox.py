"""A temporary sandbox of a project, without Ray and without a host.

It is for code that must load a project, but must not load it in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from aenv_ray import ids
from aenv_ray.clock import SystemClock
from aenv_ray.config import settings
from aenv_ray.engines.base import Engine, Sandbox, SandboxSpec
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.files import is_held
from aenv_ray.ids import HostId
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig

logger = logging.getLogger(__name__)

EngineForHost = Callable[[HostId], Engine]
_GONE_S: Final = 10.0
_LOOK_S: Final = 0.02


@contextlib.asynccontextmanager
async def fresh_sandbox(
    source: project.Project,
    *,
    lifetime_s: float,
    config: EnvironmentConfig | None = None,
    make_engine: EngineForHost | None = None,
    isolation: str | None = None,
) -> AsyncIterator[Sandbox]:
    """Start a sandbox of a project; it ends with the block, with this process, or by its deadline.

    Args:
        source: The project; the sandbox loads a copy of it, as instances do.
        lifetime_s: Time until its deadline.
        config: Replaces the config of the project. None: the project's own.
        make_engine: Makes the engine. None: a process engine with its own launcher.
        isolation: Isolation of that process engine. None: this process's setting, or ``auto``.

    Raises:
        SandboxStartFailed: Its code does not load, or the sandbox cannot be created.
        ConfigError: The project needs something that the engine does not have.
        FabricUnavailable: This machine cannot make sandboxes.
    """
    with tempfile.TemporaryDirectory(prefix=f"aenv-fresh-{os.getpid()}-", dir="/tmp") as name:
        directory = Path(name)
        copy = await asyncio.to_thread(
            project.unpack, source.archive(), source.digest, directory / "projects"
        )
        spec = SandboxSpec(
            instance_id=ids.new_instance_id(source.config.name),
            project_dir=copy,
            config=config or source.config,
            deadline=SystemClock().now() + lifetime_s,
        )
        chosen = isolation or settings().isolation or "auto"
        async with _engine(directory, make_engine, chosen) as engine:
            yield await engine.start(spec)


@contextlib.asynccontextmanager
async def _engine(
    directory: Path, make: EngineForHost | None, isolation: str
) -> AsyncIterator[Engine]:
    if make is None:
        async with _own_process_engine(directory, isolation) as engine:
            yield engine
        return
    engine = make(HostId("fresh"))
    try:
        yield engine
    finally:
        await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
        await engine.close()


@contextlib.asynccontextmanager
async def _own_process_engine(directory: Path, isolation: str) -> AsyncIterator[Engine]:
    """Yield an engine whose launcher, templates and sandboxes all end with the block.

    A launcher ends when its owner process ends. Here the owner is a ``cat`` that reads from this
    process. It ends when its input is closed, even if this process is killed.
    """
    # Otherwise the launcher would keep running, and keep templates with the project's code.
    owner = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    runtime_dir = directory / "run"
    engine = ProcessEngine(
        HostId("fresh"),
        runtime_dir=runtime_dir,
        data_dir=settings().data_dir,
        scope="fresh",
        owner_pid=owner.pid,
        isolation=isolation,
        requirements_cache=settings().requirements_cache,
    )
    try:
        yield engine
    finally:
        # A launcher holds its lock until it has ended, but removes the file earlier.
        locks = [os.open(lock, os.O_RDWR | os.O_CLOEXEC) for lock in runtime_dir.glob("*/lock")]
        try:
            owner.kill()
            await owner.wait()
            await engine.close()
            await asyncio.to_thread(_wait_for_end, locks, runtime_dir)
        finally:
            for lock in locks:
                os.close(lock)


def _wait_for_end(locks: Sequence[int], runtime_dir: Path) -> None:
    """Wait until the launchers that hold these locks have ended."""
    deadline = time.monotonic() + _GONE_S
    while any(map(is_held, locks)):
        if time.monotonic() > deadline:
            # It will end later: a launcher that nobody uses ends by itself.
            logger.warning("a launcher in %s has not ended yet", runtime_dir)
            return
        time.sleep(_LOOK_S)
