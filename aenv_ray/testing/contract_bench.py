"""Helpers for tests of the engine contract: projects, specs, sandboxes, calls and waits."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.actors.calls import wire
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import Engine, OnProgress, Sandbox, SandboxSpec
from aenv_ray.ids import InstanceId, new_call_id
from aenv_ray.models import ExecResult, ToolResult
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig

ENVIRONMENT: Final = Path(__file__).parent / "contract_environment"
LONG_S: Final = 30.0
"""Longer than any call of these tests takes on a slow machine."""

_numbers = itertools.count(1)


def unique(word: str) -> str:
    """Return a unique name that begins with `word`, for a file, a key or a call id."""
    return f"{word}-{next(_numbers)}"


def sleeper() -> list[str]:
    """Return a command that sleeps for longer than a test, with a unique argument."""
    return ["sleep", f"60.{random.randrange(10**9):09d}"]


_MIN_PAUSE_S: Final = 0.02
_MAX_PAUSE_S: Final = 0.5


def pause_s(waited_s: float, look_s: float) -> float:
    """Return how long to pause before checking a condition again, in seconds.

    A pause is a twentieth of the wait so far, or four times the duration of the last check if that
    is longer, so that checks leave most of a core to the awaited process. It is at least 0.02 s and
    at most 0.5 s.

    Args:
        waited_s: Time since the first check.
        look_s: Duration of the last check.
    """
    return min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, waited_s / 20, look_s * 4))


async def eventually(condition: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
    """Wait until the result of `condition`, awaited if it is awaitable, is true.

    Raises:
        AssertionError: It is still false after `within_s`.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        looked = loop.time()
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        waited_s = loop.time() - started
        if waited_s > within_s:
            raise AssertionError(f"not after {within_s:g} s: {what}")
        await asyncio.sleep(pause_s(waited_s, loop.time() - looked))


def write_project(
    directory: Path, files: Mapping[str, str], config: Mapping[str, Any] | None = None
) -> Path:
    """Write a project and return its directory; `files` are below ``src``."""
    for name, text in files.items():
        path = directory / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    content = {"name": "made", "version": "1.0.0", **(config or {})}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


class Bench:
    """One engine under test, with a directory for projects."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        self._clock = SystemClock()

    def project(self, files: Mapping[str, str], config: Mapping[str, Any] | None = None) -> Path:
        """Write a project of `files` below ``src`` and return its directory."""
        return write_project(self.directory / f"project-{next(_numbers)}", files, config)

    def contract_project(self, deploy: Mapping[str, Any]) -> Path:
        """Return a copy of the contract's environment with changed ``deployConfig`` fields."""
        target = self.directory / f"project-{next(_numbers)}"
        shutil.copytree(ENVIRONMENT, target, ignore=shutil.ignore_patterns("__pycache__"))
        config = json.loads((target / "config.json").read_text())
        config["deployConfig"] |= deploy
        return write_project(target, {}, config)

    def spec(
        self,
        project_dir: Path = ENVIRONMENT,
        *,
        ttl_s: float = 600.0,
        config: EnvironmentConfig | None = None,
        **fields: Any,
    ) -> SandboxSpec:
        """Return the spec of a new instance; `fields` are those of `SandboxSpec`."""
        config = config or project.read_config(project_dir / project.CONFIG_NAME)
        return SandboxSpec(
            instance_id=InstanceId(f"{config.name}-{next(_numbers):08d}"),
            project_dir=project_dir,
            config=config,
            deadline=self.now() + ttl_s,
            **fields,
        )

    def now(self) -> float:
        """Return the time on the wall clock, as deadlines use it."""
        return self._clock.now()

    async def start(self, project_dir: Path = ENVIRONMENT, **fields: Any) -> Sandbox:
        """Start one sandbox; arguments as for `spec`."""
        return await self.engine.start(self.spec(project_dir, **fields))

    async def running(self) -> set[InstanceId]:
        """Return the ids of the running sandboxes."""
        return {sandbox.instance_id for sandbox in await self.engine.running()}


async def request(
    sandbox: Sandbox,
    method: str,
    params: Mapping[str, Any],
    *,
    call_id: str | None = None,
    timeout_s: float = LONG_S,
    deadline_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> Any:
    """Make one call as a handle does, and return its decoded result."""
    meta = {"aenv/call_id": call_id or new_call_id(), "aenv/timeout_s": timeout_s}
    result = await sandbox.request(
        method,
        {**params, "_meta": meta},
        deadline_s=timeout_s + 5.0 if deadline_s is None else deadline_s,
        on_progress=on_progress,
    )
    return wire.decode(method, result)


async def call(
    sandbox: Sandbox, name: str, arguments: Mapping[str, Any] | None = None, **options: Any
) -> ToolResult:
    """Call a tool; options as for `request`."""
    params = {"name": name, "arguments": arguments or {}}
    result: ToolResult = await request(sandbox, "tools/call", params, **options)
    return result


async def value_of(sandbox: Sandbox, name: str, **arguments: Any) -> Any:
    """Call a tool and return its value.

    Raises:
        AssertionError: The tool raised.
    """
    result = await call(sandbox, name, arguments)
    assert not result.is_error, result.text()
    return result.data


async def evaluate(sandbox: Sandbox, source: str) -> Any:
    """Run Python source in the sandbox and return its variable ``result``."""
    return await value_of(sandbox, "evaluate", source=source)


async def execute(
    sandbox: Sandbox, command: str | Sequence[str], timeout_s: float = LONG_S, **arguments: Any
) -> ExecResult:
    """Run a command."""
    params = {"arguments": {"command": command, **arguments}}
    result: ExecResult = await request(sandbox, "aenv/exec", params, timeout_s=timeout_s)
    return result


async def runs(sandbox: Sandbox, argument: str) -> bool:
    """Return whether a process with this argument is visible in the sandbox."""
    return bool(await value_of(sandbox, "running", argument=argument))


async def is_gone(sandbox: Sandbox, argument: str) -> bool:
    """Return whether no process with this argument is visible in the sandbox."""
    return not await runs(sandbox, argument)
