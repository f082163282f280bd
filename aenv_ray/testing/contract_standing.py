"""The standing sandboxes of the engine contract: shared by the tests that leave them as they are.

A start is the dearest thing in the contract, and most of its tests only ask something of a sandbox.
Those share two, by the fixtures ``standing`` and ``second``. Nothing else of the engine runs beside
them: they are ended, and nothing of them may be left, before a test starts sandboxes of its own and
when the tests of the class are over.
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
        AssertionError: Something of them is left (invariant 3).
    """
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    assert await engine.running() == []
    await engine.close()
    await eventually(lambda: not left_over(), "nothing is left")


class Standing:
    """The standing sandboxes of one class of tests, on an engine of their own.

    Args:
        directory: Empty; for projects.
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
        """Return the sandbox of that name: the one that stands, or a new one where none does.

        Args:
            name: Tells the sandboxes of a class apart.
            test: Who asks.
            make_engine: As in `EngineContract`.
            left_over: As in `EngineContract`.
        """
        ended = [one.end_cause for one in self._sandboxes.values() if one.end_cause is not None]
        if ended:
            self._lost.append(f"after {self._last_test}: {ended}")
            await self.end()
        if self._bench is None:
            engine = make_engine(HostId(f"host-standing-{uuid.uuid4().hex[:8]}"))
            self._bench, self._left_over = Bench(engine, self._directory), left_over
        self._last_test = test
        if name not in self._sandboxes:
            self._sandboxes[name] = await self._bench.start(ttl_s=_TTL_S)
        return self._sandboxes[name]

    @property
    def bench(self) -> Bench:
        """What the sandboxes were started with; there is none when none stands."""
        assert self._bench is not None, "no sandbox stands"
        return self._bench

    async def check(self) -> None:
        """See that each is as a test should leave it; end them all where one is not.

        Raises:
            AssertionError: One ended, does not answer, or is not healthy; names the test.
        """
        for name, sandbox in self._sandboxes.items():
            if wrong := await _what_is_wrong(sandbox):
                word = f"{self._last_test} did not leave the {name} sandbox as it was: {wrong}"
                try:
                    await self.end()
                except (AenvError, AssertionError) as exc:
                    word += f"; and its end: {exc}"
                raise AssertionError(
                    f"{word}; the next test gets a new one. A test that does this to a sandbox "
                    "starts one of its own, by `bench`"
                )

    async def end(self) -> None:
        """End them; does nothing when none stands.

        Raises:
            AssertionError: Something of them is left (invariant 3).
        """
        if self._bench is None:
            return
        engine, self._bench = self._bench.engine, None
        self._sandboxes = {}
        await end_engine(engine, self._left_over)

    async def close(self) -> None:
        """End them for good.

        Raises:
            AssertionError: Something of them is left, or one ended between two tests.
        """
        await self.end()
        assert not self._lost, f"standing sandboxes ended by themselves, {'; '.join(self._lost)}"


async def _what_is_wrong(sandbox: Sandbox) -> str:
    """Return what is not as in a new sandbox, in words; empty when nothing is."""
    try:
        health = await request(sandbox, "aenv/health", {})
    except AenvError as exc:
        return str(exc)
    return "" if health == {"status": "healthy"} else f"its health is {health}"
