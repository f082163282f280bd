"""The Dockerfiles of built-in environments: built by `aenv build`, and played in.

Those of mini-program and reasoning-gym install Debian's packages, which takes minutes, and are not
built here. Tests of swebench run in the image of its Dockerfile. tau2 is always built
with the stand-in: the images have Debian's Python, in which tau2-bench does not run.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.cli.main import main
from aenv_ray.config import settings
from aenv_ray.engines.process.requirements import read_requirements
from aenv_ray.project import project
from aenv_ray.sampling import Task, environment_tasks
from tests.conftest import require
from tests.contract.docker.docker_node import docker
from tests.contract.docker.python_image import python_image
from tests.contract.docker.test_build import buildkit_lack
from tests.ray.cluster import Cluster
from tests.ray.envs.test_tau2 import STAND_IN

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]

NAMES: Final = ("code", "gymnasium", "mini-terminal", "tau2")


@pytest.fixture
def copy(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[Path]:
    """Yield a copy of the environment that the test names, with an image of its Dockerfile."""
    del cluster
    require("buildkit", not buildkit_lack(), buildkit_lack())
    monkeypatch.setenv("AENV_TAU2", str(STAND_IN))
    settings.cache_clear()
    found = project.resolve(request.param).path
    target = tmp_path / request.param
    shutil.copytree(found, target, ignore=shutil.ignore_patterns("__pycache__"))
    packages = read_requirements(target).packages
    image = python_image(*([" ".join(packages)] if packages else []))
    tag = f"built-{uuid.uuid4().hex[:8]}"
    options = ["-r", "localhost", "-s", "tests", "-t", tag, "--build-arg", f"PYTHON_IMAGE={image}"]
    assert main(["build", str(target), *options]) == 0
    yield target
    docker("rmi", "--force", f"localhost/tests/{request.param}:{tag}")
    settings.cache_clear()


@pytest.mark.parametrize("copy", NAMES, indirect=True)
def test_an_environment_plays_in_the_image_of_its_dockerfile(copy: Path) -> None:
    """D19: neither image nor mounts show an agent the solutions and hidden tests."""
    tasks = environment_tasks(copy)[:3]
    for policy, mean in (("reference", 1.0), ("null", 0.0)):
        sampling = aenv_ray.sample(copy, policy, tasks, engine="docker", concurrency=3)
        summary = sampling.run()
        told = [(one.status, one.error, one.reward_detail) for one in sampling.episodes]
        assert (summary.reward_mean, summary.rollouts) == (mean, len(tasks)), told
    image = json.loads((copy / "config.json").read_text())["artifacts"][0]["digest"]
    assert any(image[:19] in str(one.start_mode) for one in sampling.episodes)
    files = [path for path in copy.rglob("*") if path.is_file() and path.stat().st_size]
    wanted = " -o ".join(f"-name {one.name} -size {one.stat().st_size}c" for one in files)

    async def look(env: Any, task: Task) -> str:
        del task
        done = await env.exec(f"find / -xdev -type f \\( {wanted} \\) 2>/dev/null", timeout_s=60.0)
        return str(done.text())

    (episode,) = aenv_ray.sample(copy, look, tasks[:1], engine="docker", runners="driver")
    assert episode.output.strip() == ""
