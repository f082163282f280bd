"""The contract of `aenv_ray.engines.base` as a test class; every engine passes it.

    class TestMyEngine(EngineContract):
        known_gaps = {"test_a_full_directory_is_the_tools_own_error": "no storage limits here"}

        @pytest.fixture
        def make_engine(self):
            return MyEngine

        async def kill_sandbox(self, engine, sandbox):
            ...

A known gap is a strict expected failure: when its test passes, the run fails until the entry is
removed. Needs pytest and pytest-asyncio.

Tests that leave a sandbox unchanged share two of them, the others start their own: see
`contract_shared`. All tests of a class run on one event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench
from aenv_ray.testing.contract_calls import CallTests
from aenv_ray.testing.contract_isolation import IsolationTests, SharedIsolationTests
from aenv_ray.testing.contract_life import LifeTests
from aenv_ray.testing.contract_logs import LogTests, SharedLogTests
from aenv_ray.testing.contract_reset import ResetTests
from aenv_ray.testing.contract_shared import MakeEngine, SharedSandboxes, end_engine
from aenv_ray.testing.contract_start import StartTests


@pytest.mark.asyncio(loop_scope="class")
class EngineContract(
    StartTests, LifeTests, LogTests, IsolationTests, ResetTests,
    SharedLogTests, SharedIsolationTests, CallTests,
):  # fmt: skip
    """Tests of every guarantee of the engine contract; subclass it for an engine."""

    # The tests of the last base run first: those with shared sandboxes before those without.

    known_gaps: ClassVar[Mapping[str, str]] = {}
    """Tests that this engine fails, ``test_x`` or ``test_x[id]``, with the reason."""
    cannot_run: ClassVar[Mapping[str, str]] = {}
    """Gaps whose test would end the test process or hang, with the reason; it is not run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in (*cls.known_gaps, *cls.cannot_run):
            if not callable(getattr(cls, name.partition("[")[0], None)):
                raise TypeError(f"{cls.__name__} has no test {name!r}, a key of its known gaps")

    # --- to be overridden -------------------------------------------------------------------------

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        """Return a function that makes an engine of a host id; all on one node.

        The node must outlive the tests of the class, because the shared sandboxes run on it.
        """
        raise NotImplementedError

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        """End a sandbox from outside, as a crash would; no other sandbox runs."""
        raise NotImplementedError

    def left_over(self) -> list[str]:
        """Return what is left of this engine's sandboxes on the node, in words."""
        return []

    # --- fixtures of the tests ------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _expect_known_gaps(self, request: pytest.FixtureRequest) -> None:
        for name in (request.node.originalname, request.node.name):
            if name in self.cannot_run:
                request.applymarker(pytest.mark.xfail(reason=self.cannot_run[name], run=False))
            elif name in self.known_gaps:
                request.applymarker(pytest.mark.xfail(reason=self.known_gaps[name], strict=True))

    @pytest.fixture
    def host_id(self) -> HostId:
        """Return a unique host id."""
        return HostId(f"host-{uuid.uuid4().hex[:8]}")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def _shared(
        cls, tmp_path_factory: pytest.TempPathFactory
    ) -> AsyncIterator[SharedSandboxes]:
        shared = SharedSandboxes(tmp_path_factory.mktemp("shared"))
        yield shared
        await shared.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def shared(
        self, _shared: SharedSandboxes, make_engine: MakeEngine, request: pytest.FixtureRequest
    ) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that all tests share; they must leave it unchanged.

        Files and keys in it have unique names, from `contract_bench.unique`.
        """
        test = request.node.name
        yield await _shared.sandbox("shared", test, make_engine, self.left_over)
        await _shared.check()

    @pytest_asyncio.fixture(loop_scope="class")
    async def second(
        self,
        _shared: SharedSandboxes,
        shared: Sandbox,
        make_engine: MakeEngine,
        request: pytest.FixtureRequest,
    ) -> Sandbox:
        """Return another shared sandbox, on the same engine."""
        del shared  # started before it, and checked afterwards
        test = request.node.name
        return await _shared.sandbox("second", test, make_engine, self.left_over)

    @pytest.fixture
    def shared_bench(self, _shared: SharedSandboxes, shared: Sandbox) -> Bench:
        """Return the bench that started the shared sandboxes."""
        del shared  # started before
        return _shared.bench

    @pytest_asyncio.fixture(loop_scope="class")
    async def engine(
        self, _shared: SharedSandboxes, make_engine: MakeEngine, host_id: HostId
    ) -> AsyncIterator[Engine]:
        """Yield an engine while no other runs; afterwards nothing may be left of its sandboxes."""
        await _shared.end()
        engine = make_engine(host_id)
        yield engine
        await end_engine(engine, self.left_over)

    @pytest.fixture
    def bench(self, engine: Engine, tmp_path: Path) -> Bench:
        """Return a bench with the engine."""
        return Bench(engine, tmp_path)
