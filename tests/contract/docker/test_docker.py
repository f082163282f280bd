"""What containers add to the engine contract: causes of death, limits, isolation, the janitor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines import door
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.docker import instances as docker_instances
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.engine import DockerEngine
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.firewall import Bridge
from aenv_ray.engines.docker.logs import CUT
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import (
    ConfigError,
    FabricUnavailable,
    SandboxDiedInside,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.testing.contract_bench import Bench, call, evaluate, eventually, execute, value_of
from tests.conftest import require
from tests.contract.docker.docker_node import DockerNode, docker
from tests.contract.engines import end_of, engine_on, filled, new_host
from tests.contract.processes import signal_all

pytestmark = pytest.mark.docker


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    async with engine_on(docker_node) as engine:
        yield Bench(engine, tmp_path)
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


@pytest.fixture
def own_node() -> Iterator[DockerNode]:
    """Yield a node for one test, which may break it."""
    node = DockerNode()
    yield node
    node.end()


# --- why it died ---------------------------------------------------------------------------------


async def test_running_out_of_memory_is_the_cause(bench: Bench) -> None:
    """Invariant 2: the error names the limit."""
    sandbox = await bench.start(bench.contract_project({"memory": "64M"}))
    assert sandbox.isolation.limits["memory"].startswith("64 MiB")
    with pytest.raises(SandboxLost, match=r"out of memory .*limit 64 MiB"):
        await evaluate(sandbox, "result = len(bytearray(200 * 1024 * 1024))")


async def test_a_container_that_accepts_no_connection_now_is_not_lost(
    bench: Bench, docker_node: DockerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: it runs, so a host that cannot reach it now still has to end it."""
    monkeypatch.setattr(door, "FULL_S", 0.2)
    sandbox = await bench.start()
    name = docker_node.container(sandbox.instance_id)
    (path,) = docker_node.root.glob("r/*/d/*")
    docker("pause", name)
    with filled(str(path)), pytest.raises(FabricUnavailable, match="accepts no connection now"):
        await bench.engine.attach(sandbox.instance_id)
    docker("unpause", name)
    again = await bench.engine.attach(sandbox.instance_id)
    assert await value_of(again, "echo", text="hi") == "hi"


async def test_a_kill_from_outside_is_one_though_a_child_ran_out_of_memory(
    bench: Bench, docker_node: DockerNode
) -> None:
    """Invariant 2: the daemon reports until its end that the container ran out of memory."""
    sandbox = await bench.start(bench.contract_project({"memory": "64M"}))
    child = await execute(sandbox, ["python3", "-c", "bytearray(200 << 20)"])
    assert child.exit_code != 0
    docker("kill", docker_node.container(sandbox.instance_id))
    assert "killed by SIGKILL" in await end_of(sandbox)
    with pytest.raises(SandboxLost) as raised:
        await call(sandbox, "echo", {"text": "x"})
    assert not isinstance(raised.value, SandboxDiedInside)


async def test_a_daemon_that_fails_to_answer_ends_no_instance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2: a host that restarts with its daemon asks again."""
    sandbox = await bench.start()
    request = DockerClient.request

    async def fail(client: DockerClient, method: str, path: str, **options: Any) -> Any:
        if path.startswith("/containers/") and path.endswith("/json"):
            raise DaemonRefused(500, "starting")
        return await request(client, method, path, **options)

    with monkeypatch.context() as broken:
        broken.setattr(DockerClient, "request", fail)
        with pytest.raises(FabricUnavailable, match=r"does not tell whether .* runs: starting"):
            await bench.engine.attach(sandbox.instance_id)
    again = await bench.engine.attach(sandbox.instance_id)
    assert await value_of(again, "echo", text="hi") == "hi"


async def test_what_a_restarted_host_cannot_reach_does_not_go_on(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """Invariant 3: the instance counts as lost, and its slot is given away."""
    host = new_host()
    engine = docker_node.engine(host)
    sandbox = await Bench(engine, tmp_path).start()
    await engine.close()
    (door_path,) = docker_node.root.glob("r/*/d/*")
    door_path.unlink()
    again = docker_node.engine(host)
    with pytest.raises(SandboxLost, match="does not answer"):
        await again.attach(sandbox.instance_id)
    await again.close()
    assert docker_node.left_over() == []


async def test_a_cancelled_batch_leaves_no_sandboxes(
    bench: Bench, docker_node: DockerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: no caller knows the ones that have already started."""
    connected, connect = asyncio.Event(), DockerEngine._connect

    async def note(*arguments: Any) -> Sandbox:
        sandbox = await connect(*arguments)
        connected.set()
        return sandbox

    monkeypatch.setattr(DockerEngine, "_connect", note)
    source = "import threading\nthreading.Event().wait()\n"
    hanging = bench.project({"tools.py": source}, NETLESS)
    starts = bench.engine.start_many([bench.spec(), bench.spec(hanging)])
    starting = asyncio.create_task(starts)
    await connected.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


async def test_a_copy_that_cannot_be_written_fails_one_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime directory may be full."""
    copies, copy = itertools.count(), DockerFiles.copy_project

    def fill(files: DockerFiles, name: str, project: Path) -> Path:
        if next(copies):
            raise OSError(errno.ENOSPC, "No space left on device")
        return copy(files, name, project)

    monkeypatch.setattr(DockerFiles, "copy_project", fill)
    project = bench.contract_project({"hideSource": True})
    started = await bench.engine.start_many([bench.spec(project), bench.spec(project)])
    (failed,) = [one for one in started if isinstance(one, SandboxStartFailed)]
    assert "AENV_RUNTIME_DIR" in failed.hint
    assert len(await bench.running()) == 1


async def test_removal_by_somebody_else_is_the_cause(bench: Bench, docker_node: DockerNode) -> None:
    """Invariant 2."""
    sandbox = await bench.start()
    docker("rm", "--force", docker_node.container(sandbox.instance_id))
    assert "removed by somebody else" in await end_of(sandbox)
    assert await bench.running() == set()


async def test_the_error_for_a_dead_container_shows_the_end_of_its_log(bench: Bench) -> None:
    source = (
        "import os\nfrom aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef speak_and_die() -> None:\n"
        "    [print('line', n, flush=True) for n in range(60)]\n    os._exit(9)\n"
    )
    sandbox = await bench.start(bench.project({"tools.py": source}, NETLESS))
    with pytest.raises(SandboxLost, match="exited with code 9") as raised:
        await call(sandbox, "speak_and_die")
    lines = raised.value.message.splitlines()
    assert lines[-1] == "line 59"
    assert lines[1] == "line 10"


async def test_a_slow_reader_of_a_log_blocks_nobody_and_sees_where_output_is_missing(
    bench: Bench,
) -> None:
    """Invariant 12: the daemon keeps only the end of long output."""
    sandbox = await bench.start()
    await evaluate(sandbox, "print('begin', flush=True); result = 1")
    heard = b""
    async with contextlib.aclosing(bench.engine.logs(sandbox.instance_id, follow=True)) as pieces:
        while b"begin" not in heard:
            heard += await anext(pieces)
        lines = 14_000
        assert await evaluate(sandbox, _PRINT.format(lines=lines)) == lines
        async with asyncio.timeout(60.0):
            parts = [heard]
            while b"the end" not in parts[-1]:
                parts.append(await anext(pieces))
    said = b"".join(parts).splitlines()
    assert CUT.strip() in said
    numbers = [int(line) for line in said if line.isdigit()]
    assert numbers == sorted(set(numbers)), "nothing twice"
    assert numbers[-1] == lines - 1
    cuts = sum(after != before + 1 for before, after in itertools.pairwise([-1, *numbers]))
    assert cuts == said.count(CUT.strip())


_PRINT = """
for number in range({lines}):
    print(f"{{number:01000d}}")
print("the end", flush=True)
result = {lines}
"""
NETLESS = {"deployConfig": {"network": "none"}}


async def test_the_error_for_an_image_that_exits_at_once_shows_its_log(bench: Bench) -> None:
    source = "import os\nprint('so long', flush=True)\nos._exit(5)\n"
    with pytest.raises(SandboxStartFailed, match=r"(?s)code 5.*so long"):
        await bench.start(bench.project({"tools.py": source}, NETLESS))
    assert await bench.running() == set()


async def test_a_container_that_never_becomes_ready_is_removed(
    bench: Bench, docker_node: DockerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 3 and 9: the error names the deadline and shows the log."""
    monkeypatch.setattr(docker_instances, "BOOT_DEADLINE_S", 0.5)
    last_log = Containers.last_log

    async def once_it_spoke(containers: Containers, name: str) -> str:
        async def has_spoken() -> bool:
            return bool(await containers.log(name))

        await eventually(has_spoken, "it prints", 60.0)
        return await last_log(containers, name)

    monkeypatch.setattr(Containers, "last_log", once_it_spoke)
    source = "import threading\nprint('still looking', flush=True)\nthreading.Event().wait()\n"
    with pytest.raises(
        SandboxStartFailed, match=r"(?s)not ready after 0\.5 s.*log:\nstill looking"
    ):
        await bench.start(bench.project({"tools.py": source}, NETLESS))
    assert await bench.running() == set()
    await eventually(lambda: not docker_node.left_over(), "nothing is left", 60.0)


async def test_images_that_cannot_run_are_reported(bench: Bench, docker_node: DockerNode) -> None:
    async def start_in(image: str) -> None:
        deploy = {"network": "none", "container": {"image": image}}
        await bench.start(bench.contract_project(deploy))

    with pytest.raises(SandboxStartFailed, match=r"localhost:1/no/such:thing cannot be pulled"):
        await start_in("localhost:1/no/such:thing")
    name = f"aenv-test-empty:{uuid.uuid4().hex[:8]}"
    subprocess.run(["docker", "import", "-", name], input=bytes(1024), check=True)
    try:
        with pytest.raises(SandboxStartFailed, match="no python3"):
            await start_in(name)
    finally:
        docker("rmi", name)
    async with engine_on(docker_node, image=None) as engine:
        with pytest.raises(ConfigError, match="no image"):
            await engine.start(bench.spec())


async def test_an_unknown_oci_runtime_is_refused(bench: Bench) -> None:
    project = bench.contract_project({"container": {"runtime": "no-such-runtime"}})
    with pytest.raises(ConfigError, match=r"no runtime 'no-such-runtime'.*it has .*\brunc\b"):
        await bench.start(project)


async def test_a_project_runs_under_the_oci_runtime_that_it_names(
    bench: Bench, docker_node: DockerNode
) -> None:
    known = docker("info", "--format", "{{json .Runtimes}}")
    require("crun", '"crun"' in known, f"the daemon does not know it; it has {known}")
    project = bench.contract_project({"memory": "256M", "container": {"runtime": "crun"}})
    sandbox = await bench.start(project)
    name = docker_node.container(sandbox.instance_id)
    assert docker("inspect", "--format", "{{.HostConfig.Runtime}}", name) == "crun"
    assert await value_of(sandbox, "echo", text="under crun") == "under crun"
    status = (await execute(sandbox, "cat /proc/self/status")).text()
    assert "NoNewPrivs:\t1" in status
    assert "CapBnd:\t0000000000000000" in status
    with pytest.raises(SandboxLost, match=r"out of memory .*limit 256 MiB"):
        await evaluate(sandbox, "result = len(bytearray(600 * 1024 * 1024))")


async def test_a_project_for_another_operating_system_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"is for windows .*the Docker daemon runs linux"):
        await bench.start(bench.contract_project({"os": "windows"}))
    await bench.start(bench.contract_project({"os": "Linux"}))


async def test_without_a_daemon_the_fabric_is_unavailable(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    engine = DockerEngine(
        new_host(), runtime_dir=docker_node.root / "r", data_dir=tmp_path, scope="x",
        owner_pid=os.getpid(), address=f"unix://{tmp_path}/no.sock",
    )  # fmt: skip
    with pytest.raises(FabricUnavailable, match=r"no\.sock"):
        await engine.start_many([])
    await engine.close()


# --- walls ---------------------------------------------------------------------------------------


async def test_limits_and_capabilities_are_as_the_facts_say(
    bench: Bench, docker_node: DockerNode
) -> None:
    container = {"pids": 100, "readOnlyRoot": True}
    deploy = {"cpu": "500m", "memory": "256M", "container": container}
    sandbox = await bench.start(bench.contract_project(deploy))
    status = (await execute(sandbox, "cat /proc/self/status; id -u")).text()
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    for capabilities in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[capabilities], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert status.splitlines()[-1] == "65534"
    assert (await execute(sandbox, "touch /etc/x")).exit_code != 0
    assert (await execute(sandbox, "touch /tmp/x here")).exit_code == 0
    limits = docker(
        "inspect", "--format",
        "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}} {{.HostConfig.MemorySwap}} "
        "{{.HostConfig.PidsLimit}}",
        docker_node.container(sandbox.instance_id),
    )  # fmt: skip
    assert limits == f"500000000 {256 << 20} {256 << 20} 100"
    assert sandbox.isolation.limits["processes"] == "100 per sandbox"


async def test_commands_cannot_use_the_door_of_the_runtime(bench: Bench) -> None:
    """Invariant 8: only the host may use it."""
    sandbox = await bench.start()
    script = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(10); "
        "s.connect('/.aenv/run/door'); "
        's.sendall(b\'{"jsonrpc":"2.0","id":1,"method":"aenv/reward","params":{}}\\n\'); '
        "print(s.recv(100))"
    )
    result = await execute(sandbox, ["python3", "-c", script])
    assert (result.exit_code, result.text()) in {(0, "b''\n"), (1, "")}  # closed, or reset
    memory = await execute(sandbox, "head -c 1 /proc/1/mem; cat /proc/1/environ")
    assert memory.stdout == b""


async def test_project_and_runtime_are_read_only(bench: Bench) -> None:
    deploy = {"network": "none", "container": {"user": "root"}}
    sandbox = await bench.start(bench.contract_project(deploy))
    assert (await execute(sandbox, "id -u")).text() == "0\n"
    for path in ("/project/x", "/.aenv/runtime/x", "/.aenv/lib/x"):
        assert b"Read-only" in (await execute(sandbox, f"touch {path}")).stderr
    for path in ("/project", "/.aenv", "/.aenv/runtime"):
        assert (await execute(sandbox, f"mv {path} /other")).exit_code != 0


async def test_a_hidden_project_is_removed_once_its_code_is_loaded(bench: Bench) -> None:
    """It contains solutions and graders."""
    sandbox = await bench.start(bench.contract_project({"hideSource": True}))
    assert await value_of(sandbox, "echo", text="loaded") == "loaded"
    assert (await execute(sandbox, "find /project -mindepth 1")).text() == ""
    shown = await bench.start()
    assert "contract_tools.py" in (await execute(shown, "find /project")).text()


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


async def test_the_first_starts_share_the_network_that_one_of_them_creates(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """A daemon refuses a network that it is creating, and neither start may fail because of it."""
    if os.geteuid() != 0:
        pytest.skip("the rules of the packet filter need root")
    async with engine_on(docker_node) as one, engine_on(docker_node) as two:
        starts = []
        async with asyncio.TaskGroup() as group:
            for number, engine in enumerate((one, two, one, two)):
                bench = Bench(engine, tmp_path / str(number))
                project = bench.contract_project({"network": "internet"})
                starts.append(group.create_task(bench.start(project)))
        assert {start.result().isolation.network for start in starts} == {"internet"}


async def test_the_internet_excludes_the_node_and_its_neighbours(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """Invariant 7: the node's addresses, private ones and other sandboxes cannot be reached."""
    if os.geteuid() != 0:
        pytest.skip("the rules of the packet filter need root")
    listener = socket.create_server(("0.0.0.0", 0))
    thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    async with engine_on(docker_node) as engine:
        bench = Bench(engine, tmp_path)
        project = bench.contract_project({"network": "internet"})
        one, two = await bench.start(project), await bench.start(project)
        own = "import socket; result = socket.gethostbyname(socket.gethostname())"
        neighbour = await evaluate(two, own)
        gateway = docker(
            "network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}",
            Bridge(f"{docker_node.scope}/docker").name,
        )  # fmt: skip
        inside = await value_of(two, "evaluate", source=_LISTEN)
        for host, number in (
            (gateway, port), ("172.17.0.1", port), ("169.254.169.254", 80), (neighbour, inside),
        ):  # fmt: skip
            assert await evaluate(one, _CONNECT.format(host=host, port=number)) != "connected"
        assert one.isolation.network == "internet"
    listener.close()


_LISTEN = (
    "import socket, builtins; s = socket.create_server(('0.0.0.0', 0)); "
    "builtins.kept = s; result = s.getsockname()[1]"
)
_CONNECT = """
import socket
try:
    socket.create_connection(("{host}", {port}), timeout=3).close()
    result = "connected"
except OSError as exc:
    result = str(exc)
"""


# --- the janitor (invariant 3) --------------------------------------------------------------------


async def test_containers_end_if_their_host_stays_away(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    engine = docker_node.engine(new_host())
    await Bench(engine, tmp_path).start()
    await engine.close()
    assert docker_node.left_over()
    await eventually(lambda: not docker_node.left_over(), "nothing of it is left")


async def test_the_deadline_is_enforced_without_a_host(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    engine = docker_node.engine(new_host())
    bench = Bench(engine, tmp_path)
    sandbox = await bench.start(ttl_s=600.0)
    await engine.set_deadline(sandbox.instance_id, bench.now() + 0.5)
    await engine.close()
    await eventually(lambda: not docker_node.left_over(), "nothing of it is left")


@pytest.mark.usefixtures("watched_closely")
async def test_a_killed_janitor_is_restarted(own_node: DockerNode, tmp_path: Path) -> None:
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        sandbox = await bench.start()
        (janitor,) = await _janitor(own_node)
        os.kill(janitor, signal.SIGKILL)
        await eventually(lambda: set(own_node.janitor_pids()) - {janitor}, "another one", 60.0)
        await engine.set_deadline(sandbox.instance_id, bench.now())
        assert await end_of(sandbox) == "its TTL passed"


async def _janitor(node: DockerNode) -> list[int]:
    await eventually(node.janitor_pids, "there is a janitor")
    return node.janitor_pids()


async def test_everything_of_a_node_ends_with_its_owner_and_nothing_else(
    own_node: DockerNode, tmp_path: Path
) -> None:
    """The death of the raylet ends the containers of its node, and no other containers."""
    bystander = docker("run", "--detach", "--network=none", own_node.image, "sleep", "300")
    owner = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        engine = own_node.engine(new_host(), owner_pid=owner.pid)
        bench = Bench(engine, tmp_path)
        network = "internet" if os.geteuid() == 0 else "none"
        sandbox = await bench.start(bench.contract_project({"network": network}))
        owner.kill()
        owner.wait()
        await end_of(sandbox)
        await eventually(lambda: not own_node.containers(), "its containers are gone")
        await eventually(lambda: not own_node.janitor_pids(), "the janitor is gone")
        await engine.close()
        bridge = Bridge(f"{own_node.scope}/docker")
        assert docker("network", "ls", "-q", "--filter", f"label={own_node.label}") == ""
        rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=False)
        assert bridge.chain not in rules.stdout
        assert docker("inspect", "--format", "{{.State.Running}}", bystander) == "true"
    finally:
        docker("rm", "--force", bystander)
        assert owner.stdin is not None
        owner.stdin.close()


async def test_a_janitor_ends_overdue_containers_of_a_dead_one(
    own_node: DockerNode, docker_node: DockerNode
) -> None:
    """Any janitor of the machine ends containers past their deadline whose scope has none."""
    labels = {
        "aenv.scope": own_node.scope + "/docker",
        "aenv.host": "nobody",
        "aenv.directory": str(own_node.root / "nowhere"),
        "aenv.deadline": "1.0",
    }
    flags = [word for item in labels.items() for word in ("--label", "=".join(item))]
    docker("create", "--network=none", *flags, own_node.image, "true")
    signal_all(docker_node.janitor_pids(), signal.SIGTERM)  # a new one looks at once
    await eventually(lambda: not docker_node.janitor_pids(), "no janitor")
    async with engine_on(docker_node) as engine:
        await engine.start_many([])
        await eventually(lambda: not own_node.containers(), "the stranger is gone")
