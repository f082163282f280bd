"""Services with containers as sandboxes: image, and port of a server inside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.docker.docker_node import base_image, docker
from tests.ray.cluster import Cluster
from tests.ray.faults import eventually, eventually_empty
from tests.ray.instances.test_docker import containers
from tests.ray.services.services import ACCEPT, WIDE_S, ServiceGateway, sandboxes

pytestmark = [pytest.mark.docker, pytest.mark.redis, pytest.mark.timeout(600)]

Aenv = Callable[..., Any]
PORT = 8123
SERVE = f"cd /etc; nohup python3 -m http.server {PORT} >/dev/null 2>&1 &"


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The test proves it itself: its sandboxes live across its steps."""


@pytest.fixture
def aenv(service_gateway: ServiceGateway, tmp_path: Path) -> Aenv:
    """Run a command of `aenv service`; return its parsed output."""
    url = f"http://127.0.0.1:{service_gateway.settings.port}"

    def run(*words: str, code: int = 0) -> Any:
        done = subprocess.run(
            [
                sys.executable, "-m", "aenv_ray.cli.main", "service", *words, "-o", "json",
                "--system-url", url, "--api-key", service_gateway.token,
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=WIDE_S + 60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    return run


@pytest.fixture
def another_image(tmp_path: Path) -> Iterator[str]:
    """A second image that its containers can recognize."""
    name = f"aenv-test-another:{tmp_path.name.lower()}"
    (tmp_path / "which").write_text("another\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {base_image()}\nCOPY which /etc/which\n")
    docker("build", "--quiet", "--tag", name, str(tmp_path))
    yield name
    docker("rmi", "--force", name, check=False)


def test_an_image_and_a_port(
    service_gateway: ServiceGateway, cluster: Cluster, aenv: Aenv, another_image: str
) -> None:
    """The image can be changed; a missing image stops the update; the port is reachable."""
    gateway = service_gateway.http

    def command(text: str) -> None:
        message = {
            "jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": "execute_command", "arguments": {"command": text}},
        }  # fmt: skip
        answer = gateway.post("/services/box/mcp", json=message, headers=ACCEPT)
        assert answer.json()["result"]["isError"] is False, answer.text

    def got(path: str) -> httpx.Response:
        return gateway.get(f"/services/box/ports/{PORT}/{path}")

    made = aenv(
        "create", "mini-terminal", "--service-name", "box", "--engine", "docker",
        "--image", base_image(), "--port", str(PORT),
    )  # fmt: skip
    assert (made["image"], made["port"], made["engine"]) == (base_image(), PORT, "docker")
    assert got("which").status_code == 502, "nothing listens yet"
    command(SERVE)
    eventually(lambda: got("hostname").status_code == 200, WIDE_S)
    assert got("which").status_code == 404, "the server's own word"

    changed = aenv("update", "box", "--image", another_image)
    assert (changed["image"], changed["available_replicas"]) == (another_image, 1)
    command(SERVE)
    eventually(lambda: got("which").text == "another\n", WIDE_S)
    eventually(lambda: len(containers(cluster)) == 1, WIDE_S, lambda: containers(cluster))

    said = aenv("update", "box", "--image", "aenv-test-nowhere:1", code=1)
    assert "Failed: SandboxStartFailed: image aenv-test-nowhere:1 " in said
    assert "Traceback" not in said
    assert got("which").text == "another\n", "what was healthy goes on"

    assert aenv("delete", "box", "--yes") == {"id": "box", "deleted": True}
    eventually_empty(lambda: sandboxes("box"), WIDE_S)
    eventually_empty(lambda: containers(cluster), WIDE_S)
