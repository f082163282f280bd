"""A deployed gateway is asked directly whether it answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from aenv_ray.serve.gateway import deployment
from aenv_ray.serve.gateway.settings import GatewaySettings


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_proxy_of_the_environment_is_not_asked_for_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(deployment, "_START_S", 1.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Healthy)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        deployment._await_answer(GatewaySettings(host="0.0.0.0", port=server.server_port))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
