"""A daemon that dies and comes back.

The daemon is one of this test's own, so nothing else on the machine notices.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.docker.engine import DockerEngine
from aenv_ray.errors import FabricUnavailable, SandboxLost
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, call, eventually, value_of
from tests.conftest import require
from tests.contract.docker.docker_node import data_dir, small_image
from tests.contract.docker.own_daemon import OwnDaemon

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]


@pytest.fixture
def daemon() -> Iterator[OwnDaemon]:
    require("docker", os.geteuid() == 0, "a daemon of the test's own needs root")
    require("docker", shutil.which("dockerd") is not None, "dockerd is not installed")
    daemon = OwnDaemon(image=small_image())
    yield daemon
    daemon.end()


async def test_a_daemon_that_dies_and_comes_back(daemon: OwnDaemon, tmp_path: Path) -> None:
    """Invariants 1 and 2: sandboxes run on without it; those that its restart ends are lost."""
    engine = DockerEngine(
        HostId(f"host-{uuid.uuid4().hex[:8]}"), runtime_dir=daemon.root / "r", data_dir=data_dir(),
        scope=daemon.root.name, owner_pid=os.getpid(), address=daemon.address, image=small_image(),
    )  # fmt: skip
    bench = Bench(engine, tmp_path)
    sandbox = await bench.start()
    released = await bench.start()
    assert await value_of(sandbox, "count", key="k") == 1
    daemon.kill()
    assert await value_of(sandbox, "count", key="k") == 2
    with pytest.raises(FabricUnavailable, match=r"d\.sock does not answer"):
        await bench.start()
    with pytest.raises(FabricUnavailable):
        await engine.stop([released.instance_id])
    daemon.start()
    # Without --live-restore a daemon ends what it finds.
    await eventually(lambda: sandbox.end_cause is not None, "it is known to be lost", 60.0)
    away = "the Docker daemon was killed or unreachable, and meanwhile or on its return its main"
    with pytest.raises(SandboxLost, match=away):
        await call(sandbox, "echo", {"text": "anybody?"})
    again = await bench.start()
    assert await value_of(again, "count", key="k") == 1
    await engine.stop([released.instance_id, again.instance_id])
    assert await engine.running() == []
    await engine.close()
