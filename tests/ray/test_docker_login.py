"""A node of a cluster pulls with the login that it has itself."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.errors import SandboxStartFailed
from tests.conftest import require
from tests.contract.docker_node import docker
from tests.contract.registry import PROGRAM, Registry, log_in, push_new

pytestmark = pytest.mark.docker


def test_a_host_reads_the_login_of_its_own_node_when_it_needs_it(
    cluster: Any, nothing_left: None, tmp_path: Path
) -> None:
    del cluster, nothing_left
    require("registry", PROGRAM is not None, "docker-registry is not installed")
    registry = Registry(with_login=True)
    reference = f"{registry.name}/tests/{uuid.uuid4().hex[:8]}:1"
    image = push_new(reference, 1024, tmp_path)
    deploy = {"engine": "docker", "network": "none", "container": {"image": reference}, "warm": 0}
    project = tmp_path / "project"
    project.mkdir()
    config = {"name": "kept-closed", "version": "1.0.0", "deployConfig": deploy}
    (project / "config.json").write_text(json.dumps(config))
    try:
        with pytest.raises(SandboxStartFailed, match="wants a login and this node has none"):
            aenv_ray.create(project, actor="shared")
        log_in(settings().docker_config, registry.name)
        env = aenv_ray.create(project, actor="shared")
        assert ray.get(env.exec.remote("echo there"), timeout=60).text() == "there\n"
        ray.get(env.release.remote(), timeout=60)
    finally:
        (settings().docker_config / "config.json").unlink(missing_ok=True)
        docker("rmi", "--force", image, check=False)
        registry.end()
