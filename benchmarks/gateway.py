"""A tool call through the gateway, compared with AEnvironment's client and server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aenv_ray.client.gateway import Gateway
from aenv_ray.client.gateway_http import GatewayHttp
from aenv_ray.hub.hub_actor import end_hub, ensure_hub
from aenv_ray.hub.records import Role
from aenv_ray.project import project
from aenv_ray.serve.gateway.deployment import deploy, undeploy
from aenv_ray.serve.gateway.settings import GatewaySettings
from tests.fixtures.published_client import published_client

BUDGET = {
    "gateway_call_ratio_vs_aenvironment": "<= 1 x aenvironment's client straight to its server",
    "gateway_concurrent_ratio_vs_aenvironment": ">= 5 x aenvironment's client to its server",
}
OURS, PEER = "127.0.0.2", "127.0.0.1"
"""AEnvironment's client only knows the ports 8080 and 8081."""
CLIENT = Path(__file__).with_name("gateway_client.py")
START_S = 120.0
PEER_SOURCE = """from aenv import register_tool

@register_tool
def echo(text: str) -> str:
    return text
"""


def refusal() -> str:
    """Return why this cannot be measured here; empty if it can."""
    return published_client()[1]


def gateway(figures: dict[str, float], echo_project: Path, quick: bool) -> None:
    """Measure single and concurrent calls: ours, theirs, and their client on our gateway."""
    theirs, _ = published_client()
    assert theirs is not None
    their_python, our_python = str(theirs / "bin" / "python"), sys.executable
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token = stack.enter_context(our_gateway(echo_project))
        stack.enter_context(_their_server(their_python, root))
        ours = {"aenv_url": f"http://{OURS}:8080", "api_key": token}
        straight = stack.enter_context(
            _client(their_python, "aenv", {}, {"DUMMY_INSTANCE_IP": PEER, "HOME": str(root)})
        )
        through = stack.enter_context(
            _client(
                their_python,
                "aenv",
                {"aenv_url": f"http://{OURS}", "api_key": token},
                {"HOME": str(root)},
            )
        )
        own = stack.enter_context(_client(our_python, "aenv_ray", ours, {}))
        _measure(figures, own, through, straight, quick)


def _measure(
    figures: dict[str, float], own: Client, through: Client, straight: Client, quick: bool
) -> None:
    clients = {"gateway": own, "gateway_published": through, "aenvironment": straight}
    rounds = 7 if quick else 11
    p50: dict[str, list[float]] = {name: [] for name in clients}
    rate: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds):
        for name in sorted(clients, reverse=bool(number % 2)):
            p50[name].append(clients[name].ask("p50", 60))
        for name in sorted(clients, reverse=bool(number % 2)):
            rate[name].append(clients[name].ask("rate", 200))
    for name in clients:
        figures[f"{name}_call_p50_ms"] = 1e3 * statistics.median(p50[name])
        figures[f"{name}_calls_per_s"] = statistics.median(rate[name])
    for name, key in (("gateway", ""), ("gateway_published", "published_")):
        figures[f"gateway_{key}call_ratio_vs_aenvironment"] = _ratio(p50, name)
        figures[f"gateway_{key}concurrent_ratio_vs_aenvironment"] = _ratio(rate, name)


def _ratio(values: Mapping[str, list[float]], name: str) -> float:
    """Return the median of the ratios block by block: a drifting machine shifts both."""
    pairs = zip(values[name], values["aenvironment"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


class Client:
    """A client process that reads commands from its standard input."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, what: str, count: int) -> float:
        """Send a command and return the measured figure."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> float:
        """Return the next figure, skipping what the package logs on standard output."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("FIGURE "):
                return float(line.split()[1])
        raise RuntimeError("a client of the benchmark ended; see its log above")


@contextlib.contextmanager
def _client(
    python: str, package: str, options: Mapping[str, str], variables: Mapping[str, str]
) -> Iterator[Client]:
    hidden = ("DUMMY_INSTANCE_IP", "AENV_SYSTEM_URL", "AENV_API_KEY")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | dict(variables)
    process = subprocess.Popen(
        [python, str(CLIENT), package, "echo@1.0.0", json.dumps(options)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        client = Client(process)
        client.read()
        yield client
    finally:
        with contextlib.suppress(OSError):
            process.communicate(timeout=30)
        process.kill()
        process.wait()


@contextlib.contextmanager
def our_gateway(echo_project: Path) -> Iterator[str]:
    """Run a gateway with the echo environment published; yield a token."""
    deploy(GatewaySettings(host=OURS))
    try:
        url, token = f"http://{OURS}:8080", _admin_token()
        archive = project.load(echo_project).archive()
        digest = hashlib.sha256(archive).hexdigest()
        with Gateway(GatewayHttp(url, token)) as door:
            door.upload(archive, digest)
            door.publish(digest)
        yield token
    finally:
        undeploy()
        end_hub()


def _admin_token() -> str:
    async def make() -> Any:
        return await ensure_hub().create_token(Role.ADMIN, "benchmark")

    token: str = asyncio.run(make())[0]
    return token


@contextlib.contextmanager
def _their_server(python: str, root: Path) -> Iterator[None]:
    """Run AEnvironment's own server with the same tool."""
    source = root / "peer"
    source.mkdir()
    (source / "echo.py").write_text(PEER_SOURCE)
    command = [python, "-m", "aenv.main", str(source), "--host", PEER, "--port", "8081"]
    log = (root / "peer.log").open("w")
    process = subprocess.Popen(
        command, cwd=root, stdout=log, stderr=log, env={**os.environ, "HOME": str(root)}
    )
    try:
        _await_health(f"http://{PEER}:8081/health")
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _await_health(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{url} does not answer")
        time.sleep(0.2)
