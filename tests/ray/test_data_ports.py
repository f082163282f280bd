"""HTTP to servers inside an instance, through the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from aenv_ray.client import Environment
from aenv_ray.hub.records import Role
from tests.ray.data_gateway import GatewayBench

pytestmark = pytest.mark.usefixtures("cluster")

SOURCE = '''
import http.server, socketserver, threading
from aenv_ray.runtime import register_tool

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        told = {"method": self.command, "path": self.path, "length": len(body),
                "headers": {k.lower(): v for k, v in self.headers.items()}}
        import json
        text = json.dumps(told).encode() + b" " * (3 * len(body))
        self.send_response(201)
        self.send_header("content-length", str(len(text)))
        self.send_header("x-told", "yes")
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *args):
        pass

@register_tool
def serve(port: int) -> int:
    """Serve."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return port
'''


@pytest.fixture
async def env(gateway: GatewayBench, tmp_path: Path) -> AsyncIterator[Environment]:
    """An instance without any network, whose server listens on a declared port."""
    root = tmp_path / "server"
    (root / "src").mkdir(parents=True)
    deploy = {"network": "none", "ports": [8123, 8124]}
    (root / "config.json").write_text(json.dumps({"name": "server", "deployConfig": deploy}))
    (root / "src" / "tools.py").write_text(SOURCE)
    gateway.projects["server"] = root
    token = gateway.token(Role.OWNER)
    async with Environment("server", aenv_url=gateway.url, api_key=token) as env:
        await env.call_tool("serve", {"port": 8123})
        yield env


async def test_http_reaches_a_declared_port(gateway: GatewayBench, env: Environment) -> None:
    """Any method, headers, query and megabytes both ways; the token stays with the gateway."""
    secret = gateway.token(Role.OWNER)
    path = f"/instances/{env.instance_id}/ports"
    async with httpx.AsyncClient(
        base_url=gateway.url, headers={"authorization": f"Bearer {secret}"}, timeout=60
    ) as http:
        answer = await http.get(f"{path}/8123/a/b?c=d%20e", headers={"x-mine": "1"})
        assert (answer.status_code, answer.headers["x-told"]) == (201, "yes")
        told = answer.json()
        assert (told["method"], told["path"]) == ("GET", "/a/b?c=d%20e")
        assert told["headers"]["x-mine"] == "1"
        assert secret not in answer.text
        for method in ("POST", "DELETE"):
            body = b"x" * 2_000_000
            answer = await http.request(method, f"{path}/8123/", content=body)
            assert (answer.json()["method"], answer.json()["length"]) == (method, len(body))
            assert len(answer.content) > 3 * len(body)


async def test_other_ports_and_other_people_are_refused(
    gateway: GatewayBench, env: Environment
) -> None:
    """404 for what is not declared, 502 where nothing listens, 403 for agents."""
    path = f"/instances/{env.instance_id}/ports"
    owner = {"authorization": f"Bearer {gateway.token(Role.OWNER)}"}
    agent_token = gateway.token(Role.AGENT, instance_id=env.instance_id)
    agent = {"authorization": f"Bearer {agent_token}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for port, headers, status, code in (
            (8125, owner, 404, "tool_not_found"),
            (8124, owner, 502, "port_unreachable"),
            (8123, agent, 403, "forbidden"),
            (8123, {}, 401, "unauthorized"),
        ):
            answer = await http.get(f"{path}/{port}/", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
