"""Sidecars: what environment code can do there, and how they end with the main container."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.docker.names import sidecar_name
from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    FunctionFailed,
    SandboxLost,
    SandboxStartFailed,
    ToolTimeout,
)
from aenv_ray.ids import HostId, new_call_id
from aenv_ray.testing.contract_bench import Bench, call, eventually, request, value_of
from tests.contract.docker.docker_node import DockerNode, docker, shell_image
from tests.contract.engines import end_of, new_host

pytestmark = pytest.mark.docker

TOOLS = """
import asyncio
from pathlib import Path
from aenv_ray.runtime import sidecar
from aenv_ray.runtime import register_reward, register_tool


@register_tool
def run(command: str, timeout_s: float = 30.0) -> dict:
    result = sidecar.exec(command, timeout_s=timeout_s)
    return {"exit_code": result.exit_code, "out": result.text(), "err": result.stderr.decode()}


@register_tool
async def arun(command: str) -> str:
    return (await sidecar.aio.exec(["sh", "-c", command], env={"WORD": "given"})).text()


@register_tool
def copy(text: str) -> str:
    size = sidecar.write_file("/srv/made/here", text, mode=0o640)
    return f"{size} {sidecar.read_file('made/here').decode()}"


@register_tool
async def acopy(data: str) -> str:
    await sidecar.aio.write_file("/srv/there", data.encode())
    return (await sidecar.aio.read_file("there")).decode()


@register_tool
def size(path: str) -> int:
    return len(sidecar.read_file(path))


@register_tool
def complain() -> list:
    words = []
    for ask in (
        lambda: sidecar.exec("sleep 60", timeout_s=0.3),
        lambda: sidecar.read_file("/nothing"),
        lambda: sidecar.write_file("/proc/no", b""),
        lambda: sidecar.exec([]),
    ):
        try:
            ask()
        except (TimeoutError, OSError, ValueError) as exc:
            words.append(type(exc).__name__)
    return words


@register_tool
def share(text: str) -> str:
    Path("/shared/from-first").write_text(text)
    return sidecar.exec("cat /shared/from-first; echo back >/shared/from-second").text() + Path(
        "/shared/from-second"
    ).read_text()


@register_reward
def graded() -> float:
    return float(sidecar.exec("test -e /srv/solved").exit_code == 0)
"""


def dual_project(bench: Bench, source: str = TOOLS, **deploy: Any) -> Path:
    dual = {"podTemplate": "DualContainer", "network": "none", **deploy}
    return bench.project({"tools.py": source}, {"deployConfig": dual})


@contextlib.asynccontextmanager
async def bench_on(node: DockerNode, directory: Path, host: HostId) -> AsyncIterator[Bench]:
    engine = node.engine(host)
    yield Bench(engine, directory)
    await engine.close()


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_on(docker_node, tmp_path, new_host()) as bench:
        yield bench
        await bench.engine.stop([s.instance_id for s in await bench.engine.running()])
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


@pytest.fixture
async def pair(bench: Bench) -> Sandbox:
    return await bench.start(dual_project(bench), datasource=shell_image())


on_kept = pytest.mark.asyncio(loop_scope="module")
"""Of tests of one instance that leave it as they find it: to start two containers takes longest."""


@pytest.fixture(scope="module")
def kept_node(docker_node: DockerNode) -> Iterator[DockerNode]:
    """Yield a node of the kept pair alone: other tests look whether theirs has nothing left."""
    del docker_node  # there is a daemon
    node = DockerNode()
    yield node
    node.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(
    kept_node: DockerNode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Sandbox]:
    async with bench_on(kept_node, tmp_path_factory.mktemp("kept"), new_host()) as bench:
        sandbox = await bench.start(dual_project(bench), datasource=shell_image())
        yield sandbox
        await bench.engine.stop([sandbox.instance_id])


def sidecar_of(node: DockerNode, sandbox: Sandbox) -> str:
    return sidecar_name(node.container(sandbox.instance_id))


# --- what it reaches -----------------------------------------------------------------------------


@on_kept
async def test_environment_code_runs_commands_in_the_sidecar(kept: Sandbox) -> None:
    result = await value_of(kept, "run", command="pwd; ls /bin/busybox; echo bad >&2; exit 4")
    assert result == {"exit_code": 4, "out": "/srv\n/bin/busybox\n", "err": "bad\n"}
    assert await value_of(kept, "arun", command="echo $WORD") == "given\n"
    assert (await request(kept, "aenv/reward", {})) == 0.0
    await value_of(kept, "run", command="touch solved")
    assert (await request(kept, "aenv/reward", {})) == 1.0


@on_kept
async def test_the_sidecar_resolves_localhost(kept: Sandbox) -> None:
    result = await value_of(kept, "run", command="cat /etc/hosts /etc/resolv.conf")
    assert "127.0.0.1\tlocalhost\n" in result["out"]
    assert result["out"].endswith("nameserver 127.0.0.1\n")


@on_kept
async def test_environment_code_reads_and_writes_files_of_the_sidecar(
    kept: Sandbox,
) -> None:
    assert await value_of(kept, "copy", text="süß") == "5 süß"
    big = "x" * 3_000_000
    assert await value_of(kept, "acopy", data=big) == big
    assert await value_of(kept, "share", text="hello\n") == "hello\nback\n"


@on_kept
async def test_failures_in_the_sidecar_are_ordinary_exceptions(kept: Sandbox) -> None:
    words = await value_of(kept, "complain")
    assert words == ["TimeoutError", "OSError", "OSError", "ValueError"]


@on_kept
async def test_many_calls_use_the_sidecar_at_once(kept: Sandbox) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(value_of(kept, name, command=f"echo {n}"))
            for n in range(20)
            for name in ("run", "arun")
        ]
    outs = [task.result() for task in tasks]
    assert [out["out"] if isinstance(out, dict) else out for out in outs] == [
        f"{n}\n" for n in range(20) for _ in range(2)
    ]


@on_kept
async def test_stopping_a_call_kills_its_command_in_the_sidecar(kept: Sandbox) -> None:
    """Invariant 11."""
    with pytest.raises(ToolTimeout):
        await call(kept, "run", {"command": "sleep 4321"}, timeout_s=0.5)

    async def nothing_sleeps() -> bool:
        found = await value_of(kept, "run", command="cat /proc/[0-9]*/cmdline | head -c 9999")
        return "sleep\x004321" not in found["out"]

    await eventually(nothing_sleeps, "the command is gone")


@on_kept
async def test_the_sidecar_has_fewer_rights_and_shares_the_network(
    kept: Sandbox, kept_node: DockerNode
) -> None:
    """Invariants 7 and 8: no daemon, no door, no project, no capability, no neighbours."""
    names = [kept_node.container(kept.instance_id), sidecar_of(kept_node, kept)]
    main, sidecar = json.loads(docker("inspect", *names))
    assert sidecar["HostConfig"]["NetworkMode"] == f"container:{main['Id']}"
    assert sidecar["HostConfig"]["CapDrop"] == ["ALL"]
    assert not sidecar["HostConfig"]["CapAdd"]
    assert sidecar["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
    targets = {mount["Destination"] for mount in sidecar["Mounts"]}
    inside = {"/.aenv", "/.aenv/lib", "/.aenv/python", "/.aenv/run", "/.aenv/runtime"}
    etc = {"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}
    assert targets == {"/shared", *inside, *etc}
    assert [m["Destination"] for m in sidecar["Mounts"] if m["RW"]] == ["/shared"]
    sources = [mount["Source"] for each in (main, sidecar) for mount in each["Mounts"]]
    assert not any(word in source for source in sources for word in ("docker.sock", "containerd"))
    listing = await value_of(kept, "run", command="ls /sys/class/net")
    assert listing["out"].split() == ["lo"]
    assert "; sidecar: sha256:" in kept.start_mode


async def test_the_sidecar_gets_no_variable_of_the_instance(bench: Bench) -> None:
    """Invariant 10: commands of an agent run there."""
    pair = await bench.start(
        dual_project(bench), datasource=shell_image(), environment_variables={"KEY": "secret"}
    )
    script = "cat /proc/[0-9]*/environ; echo end"
    assert "secret" not in (await value_of(pair, "run", command=script))["out"]


async def test_an_instance_without_a_sidecar_says_so(bench: Bench) -> None:
    single = {"deployConfig": {"network": "none"}}
    sandbox = await bench.start(bench.project({"tools.py": TOOLS}, single))
    with pytest.raises(FunctionFailed, match="no second container"):
        await call(sandbox, "run", {"command": "true"})


# --- how it starts -------------------------------------------------------------------------------


async def test_its_image_is_named_by_prefix_and_datasource(bench: Bench) -> None:
    repository, _, tag = shell_image().rpartition(":")
    for prefix in (repository, f"{repository}:"):
        project = dual_project(bench, imagePrefix=prefix)
        pair = await bench.start(project, datasource=tag)
        assert (await value_of(pair, "run", command="echo up"))["out"] == "up\n"


async def test_the_error_says_why_a_sidecar_did_not_start(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="no datasource"):
        await bench.start(dual_project(bench))
    with pytest.raises(SandboxStartFailed, match=r"localhost:1/none:x cannot be pulled"):
        await bench.start(dual_project(bench), datasource="localhost:1/none:x")
    with pytest.raises(ConfigError, match='cannot have network "host"'):
        await bench.start(dual_project(bench, network="host"), datasource=shell_image())
    early = TOOLS + "\nsidecar.exec('true')\n"
    with pytest.raises(SandboxStartFailed, match="not available while the code is imported"):
        await bench.start(dual_project(bench, early), datasource=shell_image())


# --- how it ends ---------------------------------------------------------------------------------


async def test_both_end_by_one_release(
    pair: Sandbox, bench: Bench, docker_node: DockerNode
) -> None:
    assert len(docker_node.containers()) == 2
    await bench.engine.stop([pair.instance_id])
    assert docker_node.left_over() == []


async def test_killing_the_sidecar_ends_the_instance(
    pair: Sandbox, docker_node: DockerNode
) -> None:
    """Invariant 2."""
    docker("kill", sidecar_of(docker_node, pair))
    assert (await end_of(pair)).startswith("its sidecar: its main process was killed by SIGKILL")
    with pytest.raises(SandboxLost, match="sidecar"):
        await call(pair, "run", {"command": "true"})
    await eventually(lambda: not docker_node.left_over(), "both are gone")


async def test_removing_the_sidecar_ends_the_instance(
    pair: Sandbox, docker_node: DockerNode
) -> None:
    docker("rm", "--force", sidecar_of(docker_node, pair))
    assert (await end_of(pair)).startswith("its sidecar: ")
    await eventually(lambda: not docker_node.left_over(), "both are gone")


async def test_removing_the_main_container_removes_the_sidecar(
    pair: Sandbox, docker_node: DockerNode
) -> None:
    docker("rm", "--force", docker_node.container(pair.instance_id))
    assert "removed by somebody else" in await end_of(pair)
    await eventually(lambda: not docker_node.left_over(), "both are gone")


async def test_running_out_of_memory_in_the_sidecar_is_reported(bench: Bench) -> None:
    """Invariant 2: its limit is its own."""
    pair = await bench.start(dual_project(bench, memory="128M"), datasource=shell_image())
    await value_of(pair, "run", command="head -c 60000000 /dev/zero >/srv/big")
    with pytest.raises(SandboxLost, match=r"its sidecar: .*out of memory .*128 MiB"):
        await call(pair, "size", {"path": "/srv/big"})


async def test_the_janitor_ends_both(docker_node: DockerNode, tmp_path: Path) -> None:
    """Invariant 3: the host is gone."""
    async with bench_on(docker_node, tmp_path, new_host()) as bench:
        pair = await bench.start(dual_project(bench), datasource=shell_image())
        await bench.engine.set_deadline(pair.instance_id, bench.now() + 0.5)
    await eventually(lambda: not docker_node.left_over(), "nothing of it is left")


async def test_a_command_survives_its_host_and_runs_once(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    """Invariant 1: the next host gets the answer of the call and of the command in it."""
    host = new_host()
    call_id = new_call_id()
    slow = {"command": "echo x >>log; touch begun; while ! test -e go; do :; done; cat log"}
    async with bench_on(docker_node, tmp_path, host) as bench:
        pair = await bench.start(dual_project(bench), datasource=shell_image())
        under_way = asyncio.create_task(call(pair, "run", slow, call_id=call_id))

        async def has_begun() -> bool:
            listed = await value_of(pair, "run", command="ls")
            return "begun" in listed["out"]

        await eventually(has_begun, "the command runs")
    with pytest.raises(CallOutcomeUnknown):
        await under_way
    async with bench_on(docker_node, tmp_path, host) as bench:
        again = await bench.engine.attach(pair.instance_id)
        repeated = asyncio.create_task(call(again, "run", slow, call_id=call_id))
        await value_of(again, "run", command="touch go")
        assert (await repeated).data["out"] == "x\n"
        await bench.engine.stop([again.instance_id])
    assert docker_node.left_over() == []


async def test_an_instance_whose_sidecar_died_cannot_be_attached_to(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    host = new_host()
    async with bench_on(docker_node, tmp_path, host) as bench:
        pair = await bench.start(dual_project(bench), datasource=shell_image())
    docker("kill", sidecar_of(docker_node, pair))
    async with bench_on(docker_node, tmp_path, host) as bench:
        with pytest.raises(SandboxLost, match="sidecar"):
            await bench.engine.attach(pair.instance_id)
    assert docker_node.left_over() == []
