"""Containers with their own kernel (gVisor): a part of the contract, and access to the door."""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest

from aenv_ray.engines.base import Engine
from aenv_ray.engines.docker import engine as docker_engine
from aenv_ray.engines.docker.firewall import RESOLVERS
from aenv_ray.errors import SandboxLost, SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, call, eventually, execute, value_of
from tests.conftest import docker_refusal, require
from tests.contract import test_engines
from tests.contract.docker.docker_node import DockerNode, bare_project, docker, shell_image

pytestmark = pytest.mark.docker
RUNTIME = "runsc"
IS_WHOLE = bool(os.environ.get("AENV_WHOLE_CONTRACT"))
"""Run the whole contract instead of a part; takes some minutes more."""
PART = frozenset(
    {
        "test_a_repeated_call_id_gets_the_first_outcome_and_runs_nothing",
        "test_the_agents_door_does_not_reach_rewards",
        "test_a_thousand_concurrent_calls_get_their_own_answers",
        "test_cancelling_stops_the_tool",
        "test_a_sandbox_outlives_its_host",
        "test_a_call_that_its_host_left_goes_on",
        "test_a_killed_sandbox_is_lost_with_a_cause",
        "test_a_timeout_kills_the_command_and_all_it_started",
        "test_code_that_does_not_load_is_a_failed_start_that_says_why",
        "test_a_cancelled_start_leaves_nothing",
        "test_a_timeout_kills_the_program_that_the_tool_waits_for",
        "test_a_program_of_an_earlier_call_survives_the_timeout_of_a_later_one",
        "test_stop_during_calls_ends_them_as_lost",
        "test_a_large_file_is_read_back_unchanged",
        "test_a_full_directory_is_the_tools_own_error",
        "test_a_log_has_what_was_printed",
        "test_http_reaches_a_server_inside",
    }
)
"""What another kernel and another link could break; a start takes a second."""


@pytest.fixture(autouse=True, scope="module")
def _needs_gvisor() -> None:
    refusal = docker_refusal()
    require("docker", not refusal, refusal)
    known = docker("info", "--format", "{{json .Runtimes}}")
    found = RUNTIME in json.loads(known)
    require(RUNTIME, found, f"the daemon does not know it; it has {known}")


class TestDockerEngineWithItsOwnKernel(test_engines.TestDockerEngine):
    large_mib: ClassVar[int] = 20  # gVisor takes five seconds for 50
    starts_in_s: ClassVar[float] = 20.0
    known_gaps: ClassVar[dict[str, str]] = {
        "test_a_tool_that_opens_all_files_does_not_close_the_door": "gVisor lets in connections "
        "beyond the limit of open files",
    }

    @pytest.fixture
    def make_engine(self, docker_node: DockerNode) -> Callable[[HostId], Engine]:
        self.running_node = docker_node
        return functools.partial(docker_node.engine, runtime=RUNTIME)


for _name in dir(TestDockerEngineWithItsOwnKernel):
    if _name.startswith("test_") and _name not in PART and not IS_WHOLE:
        setattr(TestDockerEngineWithItsOwnKernel, _name, None)
assert all(getattr(TestDockerEngineWithItsOwnKernel, name) for name in PART)


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = docker_node.engine(HostId(f"host-{uuid.uuid4().hex[:8]}"), runtime=RUNTIME)
    yield Bench(engine, tmp_path)
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    await engine.close()
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


_KNOCK = """
import socket
for line in open('/proc/net/unix'):
    if '@aenv-' in line:
        s = socket.socket(socket.AF_UNIX); s.settimeout(60)
        s.connect(chr(0) + line.split('@')[1].strip())
        s.recv(16, socket.MSG_WAITALL)
        try:
            # An authentication without the key.
            s.sendall(bytes(48) + (15).to_bytes(2, 'big') + b'{"kind":"door"}')
            s.sendall(b'{"jsonrpc":"2.0","id":1,"method":"aenv/reward","params":{}}' + bytes([10]))
            print(s.recv(100))
        except ConnectionError:
            print(b'')
"""


_OPEN = """
import glob, os
for fd in glob.glob('/proc/[0-9]*/fd/*'):
    pid = fd.split('/')[2]
    command = open(f'/proc/{pid}/cmdline', 'rb').read()
    if pid == '1' and os.readlink(fd).startswith('socket:') or b'bridge.' + b'py' in command:
        for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY | os.O_NONBLOCK):
            try:
                os.open(fd, flags)
                print(fd, os.readlink(fd), command)
            except OSError:
                pass
"""
_BRIDGES = """
for p in /proc/[0-9]*; do
    n=${{p#/proc/}}
    if [ $n != 1 ] && tr '\\0' ' ' <$p/cmdline | grep -q '[b]ridge.py'; then {}; fi
done
"""


@pytest.mark.parametrize("user", ["65534", "root"])
async def test_processes_inside_cannot_get_the_key(
    bench: Bench, docker_node: DockerNode, user: str
) -> None:
    """Invariants 8 and 10: not from the door, memory, variables or the daemon."""
    deploy = {"network": "none", "container": {"user": user}}
    sandbox = await bench.start(bench.contract_project(deploy))
    assert sandbox.start_mode.endswith("own kernel by runsc")
    knock = await execute(sandbox, ["python3", "-c", _KNOCK], timeout_s=100.0)
    assert knock.exit_code == 0
    assert set(knock.text().splitlines()) == {"b''"}, "closed, each time"
    looks = await execute(sandbox, "head -c 1 /proc/1/mem; id -nu")
    assert looks.text() == ("root\n" if user == "root" else "nobody\n")
    opened = await execute(sandbox, ["python3", "-c", _OPEN])
    assert opened.text() == ""
    (told,) = json.loads(docker("inspect", docker_node.container(sandbox.instance_id)))
    assert told["Config"]["StdinOnce"]
    assert [mount["Destination"] for mount in told["Mounts"] if mount["RW"]] == []
    looks_for = "grep -E '^CapEff' $p/status; kill -9 $n; ls $p/fd"
    bridge = await execute(sandbox, _BRIDGES.format(looks_for))
    assert bridge.text() == "CapEff:\t0000000000000000\n"
    assert b"not permitted" in bridge.stderr
    assert await value_of(sandbox, "echo", text="still there") == "still there"


async def test_a_broken_link_ends_the_sandbox_and_its_container(
    bench: Bench, docker_node: DockerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 2 and 3: a call to a sandbox that cannot be reached is lost; nothing is left."""
    monkeypatch.setattr(docker_engine, "CAUSE_WAIT_S", 1.0)  # the daemon has nothing to report
    sandbox = await bench.start()
    name = docker_node.container(sandbox.instance_id)
    docker("exec", "--user", "64871", name, "sh", "-c", _BRIDGES.format("kill -9 $n"), check=False)
    await eventually(lambda: sandbox.end_cause is not None, "its end is known", 60.0)
    with pytest.raises(SandboxLost):
        await call(sandbox, "echo", {"text": "x"})
    await eventually(lambda: not docker_node.left_over(), "its container is gone", 60.0)


async def test_names_resolve_without_the_daemons_resolver(bench: Bench) -> None:
    """It listens on a loopback that gVisor does not share."""
    if os.geteuid() != 0:
        pytest.skip("the rules of the packet filter need root")
    sandbox = await bench.start(bench.contract_project({"network": "internet"}))
    shown = (await execute(sandbox, "cat /etc/resolv.conf; touch /etc/resolv.conf")).text()
    assert shown.split() == [word for one in RESOLVERS for word in ("nameserver", one)]


async def test_an_image_with_only_a_shell_has_commands(bench: Bench) -> None:
    sandbox = await bench.start(bare_project(bench, shell_image()))
    assert (await execute(sandbox, "echo from the shell")).text() == "from the shell\n"


async def test_the_error_for_an_image_that_exits_at_once_shows_its_log(bench: Bench) -> None:
    source = "import os\nprint('so long', flush=True)\nos._exit(5)\n"
    project = bench.project({"tools.py": source}, {"deployConfig": {"network": "none"}})
    with pytest.raises(SandboxStartFailed, match=r"(?s)code 5.*so long"):
        await bench.start(project)
    assert await bench.running() == set()
