"""Another user of the machine, without privileges, tries to use what belongs to a node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.clock import SystemClock
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import ENVIRONMENT, Bench
from tests.another_user import open_to_others
from tests.contract.docker.docker_node import DockerNode
from tests.contract.process.node import Node

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared_root() -> Iterator[Path]:
    """Return a directory that every user can enter, as /tmp and home directories often are."""
    with tempfile.TemporaryDirectory(prefix="ae-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.namespaces
async def test_doors_and_launcher_of_a_process_node(walled: Bench, walled_node: Node) -> None:
    """Invariant 15: no socket, log or list of them is open to other users."""
    await walled.start()
    assert list(walled_node.directory.rglob("*.sock"))
    assert open_to_others(walled_node.root / "r") == []


@pytest.mark.docker
async def test_doors_and_janitor_of_a_docker_node(dockered: Bench, docker_node: DockerNode) -> None:
    """Invariant 15: this includes everything that containers share with their host."""
    await dockered.start()
    docker_node.root.chmod(0o755)
    assert open_to_others(docker_node.root / "r") == []


async def test_projects_and_artifacts_are_closed(shared_root: Path) -> None:
    """Invariant 15: other owners' source is private, also where an earlier version made it open."""
    projects, artifacts = shared_root / "projects", shared_root / "d" / "artifacts"
    projects.mkdir(mode=0o755)
    source = project.load(ENVIRONMENT)
    project.unpack(source.archive(), source.digest, projects)
    store = ArtifactStore(DirectoryFiles(artifacts, SystemClock()))
    await store.put(source.archive())
    store.close()
    assert open_to_others(shared_root) == [shared_root]


def test_the_token_of_ray_is_closed(shared_root: Path) -> None:
    """Invariant 7: the token lets others run code as its user; Ray's own file has mode 0644."""
    token = shared_root / ".ray" / "auth_token"
    make = "from aenv_ray.actors.ray_shell.ray_token import use_token; use_token(make=True)"
    for _ in ("made", "left open by an earlier version"):
        environment = {"HOME": str(shared_root), "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-c", make], check=True, env=environment, umask=0o022)
        assert token.read_text()
        assert open_to_others(shared_root) == [shared_root]
        token.parent.chmod(0o755)
        token.chmod(0o644)


@pytest.mark.ray
@pytest.mark.parametrize(
    "start",
    [
        "ray.init(num_cpus=1, include_dashboard=False); ray_api.ensure_ray()",
        "ray_api.start_local(1)",
    ],
)
def test_the_token_of_a_ray_that_the_program_starts_is_closed(
    shared_root: Path, start: str
) -> None:
    """Invariant 7: also if the user called `ray.init` before the first call of ours."""
    script = f"import ray; from aenv_ray.actors.ray_shell import ray_api; {start}"
    environment = {
        "HOME": str(shared_root), "PATH": os.environ["PATH"], "RAY_AUTH_MODE": "token",
        "RAY_TMPDIR": str(shared_root), "AENV_DATA_DIR": str(shared_root / "d"),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, umask=0o022)
    token = shared_root / ".ray" / "auth_token"
    assert token.read_text()
    assert token.stat().st_mode & 0o077 == 0
