"""Failures of the daemon itself: a full disk, and its death during a build.

The daemon is one of this test's own, so nothing else on the machine notices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.engines.images.node_images import DockerImages
from aenv_ray.engines.node.docker_client import DockerClient
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.testing.contract_bench import write_project
from tests.conftest import require
from tests.contract.docker.docker_node import shell_image
from tests.contract.docker.own_daemon import OwnDaemon
from tests.contract.docker.registry import PROGRAM, Registry, push_new

pytestmark = pytest.mark.docker

_DISK_BYTES = 24 * 1024**2


class SmallDaemon(OwnDaemon):
    """A daemon with a small disk."""

    def start(self) -> None:
        data = self.root / "data"
        if not data.exists():
            data.mkdir()
            options = ["-o", f"size={_DISK_BYTES}"]
            subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(data)], check=True)
        super().start()

    @property
    def pid(self) -> int:
        """Pid of a process in its network."""
        return self.process.pid


@pytest.fixture
def daemon() -> Iterator[SmallDaemon]:
    require("docker", os.geteuid() == 0, "a daemon of its own needs root")
    daemon = SmallDaemon(image=shell_image())
    yield daemon
    daemon.end()


async def test_the_error_for_a_pull_that_fills_the_disk_says_so(
    daemon: SmallDaemon, tmp_path: Path
) -> None:
    require("registry", PROGRAM is not None, "docker-registry is not installed")
    path = f"tests/{uuid.uuid4().hex[:8]}:1"
    registry = Registry(with_login=False)
    beside = Registry(with_login=False, images=registry.images, beside=daemon.pid)
    client = DockerClient(daemon.address)
    try:
        push_new(f"{registry.name}/{path}", 2 * _DISK_BYTES, tmp_path)
        images = DockerImages(client, Credentials(tmp_path), {}, tmp_path)
        with pytest.raises(SandboxStartFailed, match="disk of the node is full") as raised:
            await images.find(f"{beside.name}/{path}")
        assert "docker image prune" in str(raised.value.hint)
    finally:
        await client.close()
        beside.end()
        registry.end()


def test_the_death_of_the_daemon_is_not_a_mistake_in_the_project(
    daemon: SmallDaemon, tmp_path: Path
) -> None:
    config = {"buildConfig": {"dockerfile": "./Dockerfile"}}
    project = write_project(tmp_path / "p", {"tools.py": ""}, config)
    (project / "Dockerfile").write_text(f"FROM {shell_image()}\nRUN sleep 600\n")
    before = (project / "config.json").read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv_ray.cli.main", "build", "-w", str(project)],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "DOCKER_HOST": daemon.address},
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr:
        while "sleep 600" not in (line := process.stderr.readline()):
            assert line
        daemon.kill()
        words = process.stderr.read()
    daemon.start()  # which ends the step
    assert process.wait(60) == 1
    assert "error: the Docker daemon at" in words
    assert "does not answer" in words
    assert (project / "config.json").read_bytes() == before
