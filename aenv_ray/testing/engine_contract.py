"""The contract of `aenv_ray.engines.base` as a test class; every engine passes it.

    class TestMyEngine(EngineContract):
        known_gaps = {"test_a_full_directory_is_the_tools_own_error": "no storage limits here"}

        @pytest.fixture
        def make_engine(self):
            return MyEngine

        async def kill_sandbox(self, engine, sandbox):
            ...

A gap is a strict expected failure: a test that begins to pass fails the run until its line is gone.
Needs pytest and pytest-asyncio.

Tests that leave a sandbox as they find it share two *standing* ones; the others start their own,
never beside those: see `contract_standing`. All tests of a class run on one event loop.
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
from aenv_ray.testing.contract_apart import ApartTests, TwoTests
from aenv_ray.testing.contract_bench import Bench
from aenv_ray.testing.contract_calls import CallTests
from aenv_ray.testing.contract_life import LifeTests
from aenv_ray.testing.contract_logs import LogTests, StandingLogTests
from aenv_ray.testing.contract_ports import PortTests
from aenv_ray.testing.contract_results import ResultTests
from aenv_ray.testing.contract_standing import MakeEngine, Standing, end_engine
from aenv_ray.testing.contract_start import StartTests
from aenv_ray.testing.contract_workspace import WorkspaceTests


@pytest.mark.asyncio(loop_scope="class")
class EngineContract(
    StartTests, LifeTests, LogTests, ApartTests,
    StandingLogTests, TwoTests, WorkspaceTests, ResultTests, CallTests, PortTests,
):  # fmt: skip
    """Every guarantee of the engine contract; subclass it for an engine."""

    # The last base's tests run first: those with the standing sandboxes, then those without.

    known_gaps: ClassVar[Mapping[str, str]] = {}
    """What this engine does not do: ``test_x`` or ``test_x[id]``, and the reason."""
    cannot_run: ClassVar[Mapping[str, str]] = {}
    """Gaps that are not tried, for that would end the test process or only wait; and the reason."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in (*cls.known_gaps, *cls.cannot_run):
            if not callable(getattr(cls, name.partition("[")[0], None)):
                raise TypeError(f"{cls.__name__}: there is no test {name!r} to have a gap")

    # --- what an engine's own tests give ----------------------------------------------------------

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        """Return what makes an engine of a host id; each call a new object on the same node.

        The node lasts at least as long as the tests of the class: the standing sandboxes are on it.
        """
        raise NotImplementedError

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        """End a sandbox from outside, as a crash would; it is the only one that runs."""
        raise NotImplementedError

    def left_over(self) -> list[str]:
        """Return what the operating system still has of this engine's sandboxes, in words."""
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
        """Return a host id that no other test has."""
        return HostId(f"host-{uuid.uuid4().hex[:8]}")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def _standing(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standing]:
        standing = Standing(tmp_path_factory.mktemp("standing"))
        yield standing
        await standing.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def standing(
        self, _standing: Standing, make_engine: MakeEngine, request: pytest.FixtureRequest
    ) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that earlier tests had and later ones will have; it must stay as it is.

        What a test leaves in it has a name of its own, by `contract_bench.unique`.
        """
        test = request.node.name
        yield await _standing.sandbox("standing", test, make_engine, self.left_over)
        await _standing.check()

    @pytest_asyncio.fixture(loop_scope="class")
    async def second(
        self,
        _standing: Standing,
        standing: Sandbox,
        make_engine: MakeEngine,
        request: pytest.FixtureRequest,
    ) -> Sandbox:
        """Return another one, on the same engine."""
        del standing  # is made before and looked at afterwards
        test = request.node.name
        return await _standing.sandbox("second", test, make_engine, self.left_over)

    @pytest.fixture
    def standing_bench(self, _standing: Standing, standing: Sandbox) -> Bench:
        """Return what the standing sandboxes were started with."""
        del standing  # is made before
        return _standing.bench

    @pytest_asyncio.fixture(loop_scope="class")
    async def engine(
        self, _standing: Standing, make_engine: MakeEngine, host_id: HostId
    ) -> AsyncIterator[Engine]:
        """Yield an engine, beside which none runs; afterwards nothing of its sandboxes is left."""
        await _standing.end()
        engine = make_engine(host_id)
        yield engine
        await end_engine(engine, self.left_over)

    @pytest.fixture
    def bench(self, engine: Engine, tmp_path: Path) -> Bench:
        """Return what tests work with."""
        return Bench(engine, tmp_path)
