"""Shared sandboxes of the engine contract, for the tests that leave them unchanged.

Starting a sandbox is the slowest part of the contract, and most tests only call one. Those share
two, the fixtures ``shared`` and ``second``. No other sandbox of the engine runs at the same time:
before a test starts its own sandboxes, and after the last test of the class, the shared ones are
stopped and must leave nothing behind.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.errors import AenvError
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, eventually, request

MakeEngine = Callable[[HostId], Engine]
LeftOver = Callable[[], list[str]]

_TTL_S = 3600.0
"""Longer than the tests of a class."""


async def end_engine(engine: Engine, left_over: LeftOver) -> None:
    """Stop an engine's sandboxes and close it.

    Raises:
        AssertionError: Something is left of them (invariant 3).
    """
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    assert await engine.running() == []
    await engine.close()
    await eventually(lambda: not left_over(), "nothing is left")


class SharedSandboxes:
    """The shared sandboxes of one test class, on a separate engine.

    Args:
        directory: An empty directory for projects.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bench: Bench | None = None
        self._left_over: LeftOver = list
        self._sandboxes: dict[str, Sandbox] = {}
        self._last_test = ""
        self._lost: list[str] = []

    async def sandbox(
        self, name: str, test: str, make_engine: MakeEngine, left_over: LeftOver
    ) -> Sandbox:
        """Return the sandbox with that name; start it if it does not run."""
        ended = [one.end_cause for one in self._sandboxes.values() if one.end_cause is not None]
        if ended:
            self._lost.append(f"after {self._last_test}: {ended}")
            await self.end()
        if self._bench is None:
            engine = make_engine(HostId(f"host-shared-{uuid.uuid4().hex[:8]}"))
            self._bench, self._left_over = Bench(engine, self._directory), left_over
        self._last_test = test
        if name not in self._sandboxes:
            self._sandboxes[name] = await self._bench.start(ttl_s=_TTL_S)
        return self._sandboxes[name]

    @property
    def bench(self) -> Bench:
        """Return the bench that started the sandboxes."""
        assert self._bench is not None, "no shared sandbox runs"
        return self._bench

    async def check(self) -> None:
        """Check that the sandboxes are healthy; stop them all if one is not.

        Raises:
            AssertionError: One ended, does not answer, or is not healthy; names the test.
        """
        for name, sandbox in self._sandboxes.items():
            if wrong := await _what_is_wrong(sandbox):
                message = f"{self._last_test} broke the {name} sandbox: {wrong}"
                try:
                    await self.end()
                except (AenvError, AssertionError) as exc:
                    message += f"; stopping it failed: {exc}"
                raise AssertionError(
                    f"{message}; the next test gets a new one. A test that breaks a sandbox must "
                    "start its own with `bench`"
                )

    async def end(self) -> None:
        """Stop them; does nothing if none runs.

        Raises:
            AssertionError: Something is left of them (invariant 3).
        """
        if self._bench is None:
            return
        engine, self._bench = self._bench.engine, None
        self._sandboxes = {}
        await end_engine(engine, self._left_over)

    async def close(self) -> None:
        """Stop them after the last test.

        Raises:
            AssertionError: Something is left of them, or one ended between two tests.
        """
        await self.end()
        assert not self._lost, f"shared sandboxes ended by themselves, {'; '.join(self._lost)}"


async def _what_is_wrong(sandbox: Sandbox) -> str:
    """Return what is wrong with a sandbox, in words; empty if it is healthy."""
    try:
        health = await request(sandbox, "aenv/health", {})
    except AenvError as exc:
        return str(exc)
    return "" if health == {"status": "healthy"} else f"its health is {health}"
