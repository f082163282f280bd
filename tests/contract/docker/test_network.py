"""What sandboxes in containers reach of the network: tried from inside, in a world of our own.

The world is a network namespace with public and private addresses, in which something listens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.docker.firewall import Bridge
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, evaluate, eventually, execute, value_of
from tests.conftest import require
from tests.contract.docker.docker_node import DockerNode, docker, shell_image
from tests.contract.processes import signal_all

pytestmark = pytest.mark.docker

NODE, PUBLIC, MIRROR, OTHER = "203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4"
PRIVATE, NEXT_DOOR = "10.203.113.7", "10.203.113.8"
PORT, SHUT = 8001, 8002
_LISTEN = """
import socket, sys, threading
def serve(listener):
    while True:
        listener.accept()[0].close()
for port in map(int, sys.argv[1:]):
    listener = socket.create_server(("0.0.0.0", port))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""
_CONNECT = """
import socket
try:
    socket.create_connection(({host!r}, {port}), timeout=3).close()
    result = "connected"
except OSError as exc:
    result = str(exc)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Create the network, with a listener on the node itself."""
    require("docker", os.geteuid() == 0, "a network namespace of the test's own needs root")
    require("docker", shutil.which("ip") is not None, "iproute2 is not installed")
    space, near, far = (f"aet{uuid.uuid4().hex[:6]}{end}" for end in "snf")
    listen = [sys.executable, "-c", _LISTEN, str(PORT), str(SHUT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        ip("netns", "add", space)
        stack.callback(ip, "netns", "del", space)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        ip("addr", "add", f"{NODE}/24", "dev", near)
        ip("link", "set", near, "up")
        ip("route", "add", "10.203.113.0/24", "dev", near)
        for address in (PUBLIC, MIRROR, OTHER, PRIVATE, NEXT_DOOR):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", far)
        ip("-n", space, "link", "set", far, "up")
        for prefix in (["ip", "netns", "exec", space], []):
            process = stack.enter_context(subprocess.Popen([*prefix, *listen], **pipes))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        yield


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = docker_node.engine(HostId(f"host-{uuid.uuid4().hex[:8]}"))
    yield Bench(engine, tmp_path)
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    await engine.close()
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


def listed(bench: Bench, *allow: str) -> Path:
    """Return a project with an allow-list."""
    return bench.contract_project({"network": "allowlist", "allow": allow})


async def reaches(sandbox: Sandbox, host: str, port: int = PORT) -> bool:
    return bool(await evaluate(sandbox, _CONNECT.format(host=host, port=port)) == "connected")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the node's resolver know some names."""
    known = {"mirror.test": MIRROR, "self.test": "127.0.0.1"}

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.usefixtures("world", "names")
async def test_only_the_allow_list_can_be_reached(bench: Bench, docker_node: DockerNode) -> None:
    """Invariant 7: no node, neighbour, other address, other port or resolver."""
    allow = [f"{PUBLIC}:{PORT}", PRIVATE, f"mirror.test:{PORT}"]
    project = listed(bench, *allow)
    one, two = await bench.start(project), await bench.start(project)
    for host, port in ((PUBLIC, PORT), (PRIVATE, PORT), (PRIVATE, SHUT), ("mirror.test", PORT)):
        assert await reaches(one, host, port), (host, port)
    neighbour = await evaluate(two, "import socket; result = socket.gethostbyname("
                                    "socket.gethostname())")  # fmt: skip
    inside = await value_of(two, "evaluate", source=(
        "import socket, builtins; s = socket.create_server(('0.0.0.0', 0)); "
        "builtins.kept = s; result = s.getsockname()[1]"
    ))  # fmt: skip
    gateway = neighbour.rpartition(".")[0] + ".1"
    for host, port in (
        (PUBLIC, SHUT), ("mirror.test", SHUT), (OTHER, PORT), (NEXT_DOOR, PORT), (NODE, PORT),
        (gateway, PORT), (neighbour, inside), ("169.254.169.254", 80), ("unlisted.test", PORT),
    ):  # fmt: skip
        assert not await reaches(one, host, port), (host, port)
    facts = one.isolation
    assert facts.network == "allowlist"
    assert facts.allowed == (allow[0], PRIVATE, f"{allow[2]} ({MIRROR})")
    assert any("names are allowed by address" in item for item in facts.missing)
    assert any(f"private networks: {PRIVATE}" in item for item in facts.missing)
    everybody = await bench.start(bench.contract_project({"network": "internet"}))
    assert await reaches(everybody, OTHER, SHUT), "the lists of others are none of its business"
    assert not await reaches(everybody, PRIVATE)


@pytest.mark.usefixtures("world")
async def test_new_sandboxes_use_the_new_address_of_a_name(
    bench: Bench, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aenv_ray.engines.docker.networks.RESOLVED_FOR_S", 0.0)
    project = listed(bench, "mirror.test")
    before = await bench.start(project)
    assert await reaches(before, "mirror.test", SHUT)
    names["mirror.test"] = OTHER
    after = await bench.start(project)
    assert after.isolation.allowed == (f"mirror.test ({OTHER})",)
    assert await reaches(after, "mirror.test")
    assert await reaches(before, "mirror.test"), "it goes on to reach what it reached"


@pytest.mark.usefixtures("world", "names")
async def test_a_sidecar_has_the_allow_list_of_the_main_container(bench: Bench) -> None:
    source = (
        "from aenv_ray.runtime import register_tool, sidecar\n"
        "@register_tool\ndef dial(to: str) -> int:\n"
        "    return sidecar.exec(f'nc -w 3 {to} </dev/null').exit_code\n"
    )
    deploy = {"podTemplate": "DualContainer", "allow": [f"mirror.test:{PORT}"]}
    project = bench.project({"tools.py": source}, {"deployConfig": deploy})
    pair = await bench.start(project, datasource=shell_image())
    assert await value_of(pair, "dial", to=f"mirror.test {PORT}") == 0
    assert await value_of(pair, "dial", to=f"mirror.test {SHUT}") != 0
    assert await value_of(pair, "dial", to=f"{PUBLIC} {PORT}") != 0


@pytest.mark.usefixtures("world", "watched_closely")
async def test_unused_networks_of_allow_lists_are_removed(
    bench: Bench, docker_node: DockerNode
) -> None:
    """A daemon has room for about thirty networks."""
    project = listed(bench, f"{PUBLIC}:{PORT}")
    bridge = Bridge(f"{docker_node.scope}/docker", (f"{PUBLIC}:{PORT}",))

    def traces() -> list[str]:
        rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True)
        found = [line for line in rules.stdout.splitlines() if bridge.chain in line]
        return found + docker("network", "ls", "-q", "--filter", f"name={bridge.name}").split()

    async def has_new_janitor() -> None:
        await eventually(docker_node.janitor_pids, "there is a janitor")
        signal_all(docker_node.janitor_pids(), signal.SIGTERM)  # a new one checks at once

    sandbox = await bench.start(project)
    await has_new_janitor()
    assert await reaches(sandbox, PUBLIC), "it is used"
    await bench.engine.stop([sandbox.instance_id])
    assert traces()
    await has_new_janitor()
    await eventually(lambda: not traces(), "network and rules are gone")
    again = await bench.start(project)
    assert await reaches(again, PUBLIC)
    assert not await reaches(again, OTHER)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("deploy", "shut"),
    [({"network": "allowlist", "allow": [PUBLIC]}, OTHER), ({"network": "internet"}, PRIVATE)],
)
async def test_flushed_rules_are_set_again(
    bench: Bench, docker_node: DockerNode, deploy: dict[str, Any], shut: str
) -> None:
    """Invariant 7: the node's firewall may be restarted while a host runs."""
    project = bench.contract_project(deploy)
    await bench.start(project)
    bridge = Bridge(f"{docker_node.scope}/docker", tuple(deploy.get("allow", ())))
    subprocess.run(["iptables", "-D", *bridge.hooks[0]], check=True)
    again = await bench.start(project)
    assert await reaches(again, PUBLIC)
    assert not await reaches(again, shut)


@pytest.mark.usefixtures("world")
async def test_a_network_that_was_pruned_is_created_again(
    bench: Bench, docker_node: DockerNode
) -> None:
    project = bench.contract_project({"network": "internet"})
    sandbox = await bench.start(project)
    await bench.engine.stop([sandbox.instance_id])
    docker("network", "rm", Bridge(f"{docker_node.scope}/docker").name)
    assert await value_of(await bench.start(project), "echo", text="hi") == "hi"


async def test_localhost_resolves_without_a_network(bench: Bench) -> None:
    """The files are ours in every network mode, and read-only: they lie on the node's disk."""
    deploy = {"network": "none", "container": {"user": "root"}}
    sandbox = await bench.start(bench.contract_project(deploy))
    for name, address in (("localhost", "::1 "), ('"$(hostname)"', "127.0.1.1 ")):
        found = await execute(sandbox, f"getent hosts {name}")
        assert (found.exit_code, found.text()[: len(address)]) == (0, address)
    for file in ("hosts", "hostname", "resolv.conf"):
        refused = await execute(sandbox, f"echo 127.0.0.1 mail.test >>/etc/{file}")
        assert refused.exit_code != 0
        assert b"Read-only file system" in refused.stderr
    assert (await execute(sandbox, "cat /etc/hostname")).text() == f"{sandbox.instance_id}\n"
    assert (await execute(sandbox, "cat /etc/resolv.conf")).text() == "nameserver 127.0.0.1\n"


async def test_a_start_fails_if_its_files_cannot_be_written(
    bench: Bench, docker_node: DockerNode
) -> None:
    await bench.start()
    (etc,) = docker_node.root.glob("r/*/etc")
    away = etc.rename(etc.with_name("away"))
    etc.write_text("in the way")
    try:
        with pytest.raises(SandboxStartFailed, match="its files cannot be written") as raised:
            await bench.start()
    finally:
        etc.unlink()
        away.rename(etc)
    assert "AENV_RUNTIME_DIR" in raised.value.hint
    await bench.start()


@pytest.mark.usefixtures("names")
async def test_a_start_fails_if_a_name_has_no_usable_address(bench: Bench) -> None:
    for name, why in (
        ("nowhere.test", "not known"),
        ("self.test", "which sandboxes may not reach"),
    ):
        with pytest.raises(SandboxStartFailed, match=rf"deployConfig\.allow: {name}.*{why}"):
            await bench.start(listed(bench, name))


@pytest.mark.parametrize(
    "deploy", [{"network": "internet"}, {"network": "allowlist", "allow": [PUBLIC]}]
)
async def test_without_rules_there_is_no_network(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deploy: dict[str, Any]
) -> None:
    """A sandbox never reaches more than it asked for."""
    await bench.engine.start_many([])  # its janitor needs programs too
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="is not available on this node: iptables"):
        await bench.start(bench.contract_project(deploy))


async def test_without_a_network_there_is_only_the_loopback(bench: Bench) -> None:
    sandbox = await bench.start()
    shown = await execute(sandbox, "cat /proc/net/dev")
    assert [line.split(":")[0].strip() for line in shown.text().splitlines()[2:]] == ["lo"]
