"""Which engines a node can run."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from aenv_ray.actors.host.node_engines import engine_refusal, found_engines
from aenv_ray.config import Settings


def test_a_machine_runs_containers_while_its_daemon_listens() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path, none = Path(directory, "docker.sock"), Path(directory, "token")
        settings = Settings(docker_host=f"unix://{path}")
        assert found_engines(settings, none) == ("process", "fake")
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.bind(str(path))
            assert found_engines(settings, none) == ("process", "fake"), "a socket that is stale"
            daemon.listen()
            assert found_engines(settings, none) == ("process", "docker", "fake")


def test_a_pod_runs_pods_and_the_setting_is_preferred(tmp_path: Path) -> None:
    settings = Settings(docker_host="tcp://elsewhere:2375", engine="kubernetes")
    assert found_engines(settings, tmp_path / "token") == ("kubernetes", "process", "fake")
    (tmp_path / "token").touch()
    settings = Settings(docker_host="tcp://elsewhere:2375")
    assert found_engines(settings, tmp_path / "token") == ("process", "kubernetes", "fake")


def test_a_refusal_names_the_engines_that_the_nodes_have() -> None:
    nodes = [("kubernetes",), ("kubernetes",), ("process", "fake")]
    refusal = engine_refusal(("docker",), nodes)
    assert refusal is not None
    assert refusal.message == (
        "no node can run instances on engine docker; the nodes of the cluster: "
        "2 with kubernetes; 1 with process, fake"
    )
    assert engine_refusal(("docker", "process"), nodes) is None
    assert engine_refusal(("docker",), [*nodes, ()]) is None, "nobody knows"
    assert engine_refusal((), nodes) is None
    assert engine_refusal(("docker",), []) is None, "a node may come"
