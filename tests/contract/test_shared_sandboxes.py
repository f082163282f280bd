"""Tests of the engine contract share sandboxes; only a test that breaks one is blamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.engines.fake.engine import FakeEngine
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import eventually, request, value_of
from aenv_ray.testing.contract_shared import SharedSandboxes


class Case:
    """Shared sandboxes on the fake engine, as the tests of a class have them."""

    def __init__(self, directory: Path) -> None:
        self.shared = SharedSandboxes(directory)
        self.engines: list[FakeEngine] = []

    def make_engine(self, host_id: HostId) -> Engine:
        self.engines.append(FakeEngine(host_id))
        return self.engines[-1]

    async def sandbox(self, test: str = "test_a", name: str = "shared") -> Sandbox:
        return await self.shared.sandbox(name, test, self.make_engine, list)

    async def kill(self, sandbox: Sandbox) -> None:
        self.engines[-1].kill(sandbox.instance_id)
        await eventually(lambda: sandbox.end_cause is not None, "its end is known")

    async def running(self) -> int:
        return sum([len(await engine.running()) for engine in self.engines])


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[Case]:
    case = Case(tmp_path)
    yield case
    await case.shared.end()
    assert await case.running() == 0


async def test_one_is_shared_until_it_is_ended(case: Case) -> None:
    first = await case.sandbox()
    await case.shared.check()
    assert await case.sandbox("test_b") is first
    second = await case.sandbox("test_b", "second")
    assert second is not first
    assert await case.running() == 2
    await case.shared.end()
    assert await case.running() == 0
    again = await case.sandbox("test_c")
    assert await value_of(again, "echo", text="up") == "up"
    await case.shared.close()


async def test_a_test_that_ended_it_is_named_and_the_next_gets_a_new_one(case: Case) -> None:
    await case.kill(await case.sandbox("test_that_kills"))
    with pytest.raises(AssertionError, match=r"test_that_kills broke .*it was killed"):
        await case.shared.check()
    assert await value_of(await case.sandbox("test_next"), "echo", text="up") == "up"
    await case.shared.check()
    await case.shared.close()


async def test_a_test_that_ended_the_second_one_is_named(case: Case) -> None:
    await case.sandbox("test_that_kills")
    await case.kill(await case.sandbox("test_that_kills", "second"))
    with pytest.raises(AssertionError, match="test_that_kills broke the second sandbox"):
        await case.shared.check()


async def test_a_test_that_changed_it_is_named(case: Case) -> None:
    sick = {"name": "set_health", "arguments": {"status": "sick"}}
    await request(await case.sandbox("test_that_changes"), "aenv/function", sick)
    with pytest.raises(AssertionError, match=r"test_that_changes broke .*sick"):
        await case.shared.check()
    assert await request(await case.sandbox(), "aenv/health", {}) == {"status": "healthy"}


async def test_one_that_ends_between_tests_is_replaced_and_reported_at_the_end(case: Case) -> None:
    first = await case.sandbox("test_before")
    await case.shared.check()
    await case.kill(first)
    assert await case.sandbox("test_after") is not first
    await case.shared.check()
    with pytest.raises(AssertionError, match=r"by themselves, after test_before: .*killed"):
        await case.shared.close()


async def test_its_end_waits_until_nothing_is_left(case: Case) -> None:
    """Invariant 3."""
    looks: list[int] = []

    def left_over() -> list[str]:
        looks.append(1)
        return ["a file"] if len(looks) < 3 else []

    await case.shared.sandbox("shared", "test_a", case.make_engine, left_over)
    await case.shared.end()
    assert len(looks) == 3
