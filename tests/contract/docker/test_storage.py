"""Storage that outlives containers, with a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.testing.contract_bench import Bench, execute
from tests.contract.docker.docker_node import DockerNode
from tests.contract.docker.test_docker import engine_on
from tests.contract.process.test_storage import SOURCE, a_storage, said

pytestmark = pytest.mark.docker


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    async with engine_on(docker_node) as engine:
        yield Bench(engine, tmp_path)


@pytest.mark.parametrize("path", ["/home/admin/data", "/home/agent/kept"])
async def test_only_one_container_at_a_time_uses_a_storage(bench: Bench, path: str) -> None:
    """The next one waits, and finds the data of the one before."""
    storage = a_storage(mount_path=path)
    project = bench.project({"tools.py": SOURCE}, {"deployConfig": {"network": "none"}})
    variables = {"KEPT": path}
    first = await bench.start(project, storage=storage, environment_variables=variables)
    again = bench.start(project, storage=storage, environment_variables=variables)
    later = asyncio.create_task(again)
    assert await said(first, "note", text="one") == "start\none\n"
    assert not later.done()
    await bench.engine.stop([first.instance_id])
    second = await later
    assert await said(second, "at_start") == "start\none\nstart\n"
    assert any(path in words for words in second.isolation.missing)
    await bench.engine.stop([second.instance_id])
    await bench.engine.delete_storage(storage)


async def test_any_user_of_an_image_can_write_to_a_storage(bench: Bench) -> None:
    storage = a_storage(is_shared=True)
    for user in ("0:0", "1234:1234"):
        project = bench.contract_project({"network": "none", "container": {"user": user}})
        sandbox = await bench.start(project, storage=storage)
        done = await execute(sandbox, f"id -u > /home/admin/data/{user[0]}; ls /home/admin/data")
        assert done.exit_code == 0, done.stderr
    assert done.text().split() == ["0", "1"]
