"""Images with only a shell: commands and files work, and the error for tools says why not."""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import FileAccessError, SandboxStartFailed, ToolNotFound, ToolTimeout
from aenv_ray.ids import HostId, new_call_id
from aenv_ray.testing.contract_bench import Bench, call, eventually, execute, request
from tests.contract.docker.docker_node import DockerNode, bare_project, shell_image

pytestmark = pytest.mark.docker


@pytest.fixture
async def bench(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = docker_node.engine(HostId(f"host-{uuid.uuid4().hex[:8]}"))
    yield Bench(engine, tmp_path)
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    await engine.close()
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


@pytest.fixture
async def plain(bench: Bench) -> Sandbox:
    return await bench.start(bare_project(bench, shell_image()))


async def test_commands_run_in_an_image_with_only_a_shell(plain: Sandbox) -> None:
    result = await execute(plain, "echo $AENV_INSTANCE_ID; ls / >&2; exit 3")
    assert (result.exit_code, result.text()) == (3, f"{plain.instance_id}\n")
    assert b"python" not in (await execute(plain, "ls /bin")).stdout
    assert (await execute(plain, ["no-such-program"])).exit_code == 127
    echoed = await execute(plain, ["cat"], stdin=base64.b64encode(b"\0\xff").decode())
    assert echoed.stdout == b"\0\xff"


async def test_files_work_in_an_image_with_only_a_shell(
    plain: Sandbox,
) -> None:
    data = bytes(range(256)) * 5000
    coded = {"path": "made/here", "data": base64.b64encode(data).decode(), "mode": 0o600}
    assert await request(plain, "aenv/write_file", {"arguments": coded}) == len(data)
    assert await request(plain, "aenv/read_file", {"arguments": {"path": "made/here"}}) == data
    (entry,) = await request(plain, "aenv/list_files", {"arguments": {"path": "made"}})
    assert (entry.name, entry.type, entry.size_bytes) == ("here", "file", len(data))
    with pytest.raises(FileAccessError, match="No such file"):
        await request(plain, "aenv/read_file", {"arguments": {"path": "nothing"}})


async def test_a_command_that_is_too_slow_is_killed_with_its_children(plain: Sandbox) -> None:
    with pytest.raises(ToolTimeout):
        await execute(plain, "sleep 1234 & sleep 1234", timeout_s=0.5)

    async def nothing_sleeps() -> bool:
        found = await execute(plain, "cat /proc/[0-9]*/cmdline")
        return b"1234" not in found.stdout

    await eventually(nothing_sleeps, "no sleep is left")


async def test_a_repeated_command_runs_once_in_any_image(plain: Sandbox) -> None:
    """Invariant 1."""
    call_id = new_call_id()
    params = {"arguments": {"command": "echo x >>log; cat log"}}
    first = await request(plain, "aenv/exec", params, call_id=call_id)
    assert (await request(plain, "aenv/exec", params, call_id=call_id)).text() == first.text()
    assert (await execute(plain, "cat log")).text() == "x\n"


async def test_the_error_says_why_there_are_no_tools(bench: Bench) -> None:
    deploy = {"network": "none", "container": {"image": shell_image()}}
    sandbox = await bench.start(bench.contract_project(deploy))
    reason = r"aenv-test-shell:.* has no python3 that starts, and tools need 3\.11"
    assert sandbox.start_mode.partition(" with ")[2].startswith("commands and files only: image")
    for method in ("tools/call", "aenv/function", "aenv/reward"):
        with pytest.raises(ToolNotFound, match=reason):
            await request(sandbox, method, {"name": "echo", "arguments": {"text": "x"}})
    assert await request(sandbox, "tools/list", {}) == []
    assert (await request(sandbox, "aenv/health", {}))["status"] == "success"
    (bare,) = [await bench.start(bare_project(bench, shell_image()))]
    with pytest.raises(ToolNotFound, match="the project has no code"):
        await call(bare, "echo")


async def test_an_image_with_python_and_a_project_without_code_has_commands(
    bench: Bench, docker_node: DockerNode
) -> None:
    """Only if the project asks for that: code missing by mistake is an error."""
    with pytest.raises(SandboxStartFailed, match="no Python files"):
        await bench.start(bare_project(bench, docker_node.image))
    sandbox = await bench.start(bare_project(bench, docker_node.image, door="commands"))
    assert (await execute(sandbox, ["python3", "-c", "print(6 * 7)"])).text() == "42\n"
    assert "the project has no code" in sandbox.start_mode


async def test_an_instance_of_a_plain_image_can_be_attached_to(
    docker_node: DockerNode, tmp_path: Path
) -> None:
    host = HostId(f"host-{uuid.uuid4().hex[:8]}")
    first = docker_node.engine(host)
    bench = Bench(first, tmp_path)
    sandbox = await bench.start(bare_project(bench, shell_image()))
    await execute(sandbox, "echo kept >file")
    await first.close()
    second = docker_node.engine(host)
    again = await second.attach(sandbox.instance_id)
    assert (await execute(again, "cat file")).text() == "kept\n"
    assert again.start_mode == sandbox.start_mode
    await second.stop([again.instance_id])
    await second.close()
