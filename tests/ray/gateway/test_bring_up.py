"""What a head runs beside ``ray start``: hub and gateway come up, and stay when it runs again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.hub import hub_actor
from aenv_ray.serve.gateway.deployment import is_deployed, undeploy
from tests.ray.cluster import Cluster
from tests.ray.faults import processes_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]  # three cold starts of Ray's workers

SECRET = "aenv_0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Head:
    """A head that starts, as far as our part of it goes."""

    cluster: Cluster
    port: int
    mcp_port: int
    token_file: Path

    def bring_up(self) -> str:
        """Run it to its end; return what it logged."""
        ran = subprocess.run(
            [
                sys.executable, "-m", "aenv_ray.serve.gateway.bring_up", "--host", "127.0.0.1",
                "--port", str(self.port), "--mcp-port", str(self.mcp_port),
                "--ray-port", self.cluster.address.rpartition(":")[2],
                "--admin-token-file", str(self.token_file),
            ],
            env={**os.environ, "RAY_ADDRESS": self.cluster.address},
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert SECRET not in ran.stdout + ran.stderr
        return ran.stderr

    def get(self, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {SECRET}"}
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=60)

    def replicas(self) -> list[int]:
        title = "ray::ServeReplica:aenv-gateway"
        found = processes_of(self.cluster.root).items()
        return sorted(pid for pid, command in found if command.startswith(title))


@pytest.fixture(scope="module")
def head(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    from ray import serve

    token_file = tmp_path_factory.mktemp("admin") / "token"
    token_file.write_text(f"{SECRET}\n")
    yield Head(cluster, free_port(), free_port(), token_file)
    undeploy()
    serve.shutdown()
    hub_actor.end_hub()


def test_a_restarted_head_keeps_hub_gateway_and_token(
    head: Head,
) -> None:
    assert "the hub and the gateway are up" in head.bring_up()
    assert is_deployed()
    tokens = head.get("/tokens").json()["data"]
    # Modules before this one made tokens too.
    assert [t["role"] for t in tokens if t["note"] == "of the cluster"] == ["admin"]
    before = head.replicas()
    assert len(before) == 1

    head.bring_up()  # another head, that finds what lives
    assert head.replicas() == before
    assert head.get("/tokens").json()["data"] == tokens
