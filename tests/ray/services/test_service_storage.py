"""Storage of services on a real Serve: failures, updates, parking, deletion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import aenv_ray
from aenv_ray import serve as services
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.serve.services.apps import DEPLOYMENT, ServiceStatus, app_name
from tests.ray.faults import eventually, eventually_empty
from tests.ray.services.services import WIDE_S, ServiceGateway, sandboxes

pytestmark = [pytest.mark.redis, pytest.mark.namespaces, pytest.mark.timeout(400)]

SOURCE = """
import http.server
import os
import threading
from pathlib import Path
from aenv_ray.runtime import register_tool

if os.environ.get("BREAK"):
    raise RuntimeError("it is broken")
LOG = Path("/kept/log")
if LOG.parent.exists():
    with open(LOG, "a") as log:
        log.write(f"start {os.environ.get('GREETING', 'none')}\\n")


@register_tool
def note(text: str) -> str:
    with open(LOG, "a") as log:
        log.write(text + "\\n")
    return LOG.read_text()


@register_tool
def listen(port: int) -> None:
    handler = http.server.SimpleHTTPRequestHandler
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Path("greeting.txt").write_text("from inside")
"""


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The gateway lives across tests; each test removes its services."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("notes")
    (root / "src").mkdir()
    deploy_config = {"network": "none", "service": {"mountPath": "/kept"}}
    config = {"name": "notes", "version": "1.0.0", "deployConfig": deploy_config}
    (root / "config.json").write_text(json.dumps(config))
    (root / "src" / "tools.py").write_text(SOURCE)
    return root


@pytest.fixture(scope="module")
def gateway(service_gateway: ServiceGateway) -> httpx.Client:
    return service_gateway.http


def said(handle: Any, name: str, **arguments: Any) -> Any:
    result = handle.call_tool.remote(name, arguments).result(timeout_s=WIDE_S)
    assert not result.is_error, result
    return result.data


def gone(service: str) -> None:
    eventually_empty(lambda: sandboxes(service), WIDE_S)


def test_a_storage_outlives_the_replicas_of_its_service(gateway: httpx.Client, root: Path) -> None:
    """Each sandbox continues where the previous one ended: no two write at once."""
    import ray

    del gateway
    kept: dict[str, Any] = {"name": "notes", "owner": "ann", "enable_storage": True}
    handle = services.deploy(root, **kept)
    expected = "start none\n1\n"
    assert said(handle, "note", text="1") == expected

    (before,) = sandboxes("notes")
    prefix = f"SERVE_REPLICA::{app_name('notes')}#{DEPLOYMENT}#"
    (victim,) = [
        row for row in ray.util.list_named_actors(all_namespaces=True)
        if row["name"].startswith(prefix)
    ]  # fmt: skip
    ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]))
    eventually(lambda: (now := sandboxes("notes")) and before not in now, WIDE_S)
    eventually(lambda: services.state("notes").status is ServiceStatus.RUNNING, WIDE_S)
    expected += "start none\n2\n"
    assert said(handle, "note", text="2") == expected

    handle = services.deploy(root, **kept, environment_variables={"GREETING": "hi"})
    expected += "start hi\n3\n"
    assert said(handle, "note", text="3") == expected

    with pytest.raises(FabricUnavailable, match="did not become healthy"):
        services.deploy(root, **kept, environment_variables={"BREAK": "1"})
    eventually(lambda: services.state("notes").status is ServiceStatus.RUNNING, WIDE_S)
    assert "rolled back" in services.state("notes").reason
    expected += "start hi\nback\n"
    assert said(handle, "note", text="back") == expected

    assert services.deploy(root, **kept, replicas=0) is None
    gone("notes")
    handle = services.deploy(root, **kept)
    expected += "start hi\n4\n"
    assert said(handle, "note", text="4") == expected

    services.remove("notes")
    gone("notes")
    handle = services.deploy(root, **kept)
    assert said(handle, "note", text="5") == expected + "start none\n5\n"

    with pytest.raises(ConfigError, match="a single writer"):
        services.deploy(root, **kept, replicas=2)
    services.remove("notes", delete_storage=True)
    handle = services.deploy(root, **kept)
    assert said(handle, "note", text="6") == "start none\n6\n"
    services.remove("notes", delete_storage=True)
    gone("notes")


def test_a_service_has_the_requested_resources_and_port(gateway: httpx.Client, root: Path) -> None:
    handle = services.deploy(root, name="web", owner="ann", memory="512Mi", port=8000)
    try:
        (info,) = [one for one in aenv_ray.list_instances() if one.id in sandboxes("web")]
        assert info.isolation.limits["memory"].startswith("512 MiB")
        said(handle, "listen", port=8000)
        found = gateway.get("/services/web/ports/8000/greeting.txt")
        assert (found.status_code, found.text) == (200, "from inside")
        assert gateway.get("/services/web/ports/8001/greeting.txt").status_code == 404
    finally:
        services.remove("web")
    gone("web")
