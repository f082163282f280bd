"""The public door as a real process, spoken to by real clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import (
    CallOutcomeUnknown,
    DeadlineExceeded,
    FabricUnavailable,
    FunctionFailed,
    SandboxLost,
    SandboxStartFailed,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)

pytestmark = pytest.mark.e2e

PROJECT = Path(__file__).parents[1] / "fixtures" / "projects" / "kitchen-sink"
START_S = 30.0


class Server:
    """A server process; `url` and `socket` are its two doors."""

    def __init__(self, process: subprocess.Popen[str], url: str, socket_path: Path) -> None:
        self.process = process
        self.url = url
        self.socket = socket_path

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)


@contextmanager
def serving(project: Path, tmp_path: Path, *flags: str) -> Iterator[Server]:
    socket_path = tmp_path / f"{uuid.uuid4().hex[:8]}.sock"
    log = (tmp_path / "server.log").open("a")
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "aenv_ray.runtime", str(project), "--host", "127.0.0.1"],
            *["--port", "0", "--socket", str(socket_path), *flags],
        ],
        stdout=log,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        yield Server(process, _read_url(process), socket_path)
    finally:
        process.kill()
        process.communicate()
        log.close()


def _read_url(process: subprocess.Popen[str]) -> str:
    """Return the URL from the line that says that the server listens; drain the rest."""
    assert process.stderr is not None
    stderr = process.stderr
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    for line in stderr:
        if "listening on" in line:
            watchdog.cancel()
            threading.Thread(target=stderr.read, daemon=True).start()
            return line.rsplit(maxsplit=1)[-1]
    raise AssertionError("the server ended before it listened")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PROJECT, tmp_path_factory.mktemp("door")) as server:
        yield server


@pytest.fixture
async def instance(server: Server) -> AsyncIterator[HttpInstance]:
    instance = HttpInstance(server.url)
    yield instance
    await instance.close()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110  # the other process sets no event
            await asyncio.sleep(0.01)
    assert condition(), what


def fast_door(server: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(server.socket))
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        sock.sendall(json.dumps(message).encode() + b"\n")
        with sock.makefile("rb") as lines:
            answer: dict[str, Any] = json.loads(lines.readline())
            return answer


async def plain_mcp(server: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """POST as with curl: no session, no special headers."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"{server.url}/mcp", json=message)
    answer: dict[str, Any] = response.json()
    return answer


# --- both doors ----------------------------------------------------------------------------------

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"text": "hällo\u2028\n\x0b", "times": 2}),
    ("echo", {"text": "", "times": 1}),
    ("aecho", {"text": "\U0001f600"}),
    ("add", {"a": 1, "b": "2"}),
    ("add", {"a": 2**80, "b": -1}),
    ("move-point", {"point": {"x": 1}, "by": [2, 3]}),
    ("nothing", {}),
    ("not_a_number", {}),
    ("some_bytes", {}),
    ("picture", {}),
    ("mixed", {}),
    ("huge", {}),
    ("broken", {"text": "why"}),
    ("unsendable", {}),
    ("too_slow", {}),
    ("steps", {}),
    ("add", {"a": "x"}),
    ("add", {"a": 1, "b": 2, "c": 3}),
    ("no-such-tool", {}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=lambda value: str(value)[:30])
async def test_both_doors_give_the_same_result(
    server: Server, name: str, arguments: dict[str, Any]
) -> None:
    """Design D5: the doors differ in nothing but their wire."""
    params = {"name": name, "arguments": arguments}
    fast = fast_door(server, "tools/call", params)
    public = (await plain_mcp(server, "tools/call", params))["result"]
    if "error" in fast:
        assert public["isError"] is True
        assert public["_meta"]["aenv/error"] == fast["error"]["data"]
        assert fast["error"]["message"] in public["content"][0]["text"]
    else:
        assert public == fast["result"]


async def test_both_doors_list_the_same_tools(server: Server) -> None:
    def stated(answer: dict[str, Any]) -> list[dict[str, Any]]:
        tools = answer["result"]["tools"]
        return [{k: v for k, v in tool.items() if v is not None} for tool in tools]

    public = stated(await plain_mcp(server, "tools/list", {}))
    assert public == stated(fast_door(server, "tools/list", {}))
    moved = next(tool for tool in public if tool["name"] == "move-point")
    assert moved["description"] == "Move a point."
    assert moved["annotations"] == {"idempotentHint": True}


@pytest.mark.parametrize(
    ("method", "path", "params"),
    [
        ("aenv/function", "/functions/reset", {"name": "reset", "arguments": {"seed": 1}}),
        ("aenv/function", "/functions/areset", {"name": "areset", "arguments": {"seed": "x"}}),
        ("aenv/function", "/functions/fail", {"name": "fail", "arguments": {"message": "no"}}),
        ("aenv/reward", "/task/reward", {"arguments": {"answer": "42"}}),
        ("aenv/reward", "/task/reward/length", {"name": "length", "arguments": {"answer": "42"}}),
        ("aenv/reward", "/task/reward/broken-reward", {"name": "broken-reward"}),
        ("aenv/reward", "/task/reward/none", {"name": "none", "arguments": {}}),
    ],
)
async def test_both_doors_call_the_same_functions(
    server: Server, method: str, path: str, params: dict[str, Any]
) -> None:
    fast = fast_door(server, method, params)
    async with httpx.AsyncClient() as client:
        body = (await client.post(server.url + path, json=params.get("arguments", {}))).json()
    if "error" in fast:
        data = dict(fast["error"]["data"])
        assert body == {"success": False, "error": data.pop("message"), **data}
    else:
        assert body == {"success": True, **fast["result"]}


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_fastmcp_client(server: Server, tmp_path: Path, mode: Any) -> None:
    from fastmcp import Client
    from fastmcp.client.transports import StreamableHttpTransport

    progress: list[float] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    async with Client(StreamableHttpTransport(f"{server.url}/mcp"), mode=mode) as client:
        assert "add" in [tool.name for tool in await client.list_tools()]
        result = await client.call_tool("aecho", {"text": "hi"})
        assert result.structured_content == {"text": "hi"}
        refused = await client.call_tool("add", {"a": "x", "b": 1}, raise_on_error=False)
        assert refused.is_error
        await client.call_tool("steps", {"total": 3}, progress_handler=on_progress)
        assert progress == [1, 2, 3]
        huge = await client.call_tool("huge", {})
        assert huge.meta is not None
        assert huge.meta["aenv/truncated"] is True
        marker = tmp_path / "call"
        call = asyncio.create_task(client.call_tool("until_stopped", {"marker": str(marker)}))
        await eventually((tmp_path / "call.began").exists, "the tool began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually((tmp_path / "call.stopped").exists, "invariant 11: the tool was told")
        assert (await client.call_tool("add", {"a": 1, "b": 1})).structured_content == {"result": 2}


@pytest.mark.parametrize("tool", ["until_stopped", "auntil_stopped"])
async def test_official_mcp_client(server: Server, tmp_path: Path, tool: str) -> None:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import CallToolResult, ImageContent

    async with (
        streamable_http_client(f"{server.url}/mcp") as (read, write),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        assert len((await session.list_tools()).tools) > 10
        result = await session.call_tool("picture", {})
        assert isinstance(result, CallToolResult)
        (image,) = result.content
        assert isinstance(image, ImageContent)
        assert image.mime_type == "image/png"
        assert base64.b64decode(image.data).startswith(b"\x89PNG")
        marker = tmp_path / "call"
        call = asyncio.create_task(session.call_tool(tool, {"marker": str(marker)}))
        await eventually((tmp_path / "call.began").exists, "the tool began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually((tmp_path / "call.stopped").exists, "invariant 11: the tool was told")


# --- concurrency, cancellation -------------------------------------------------------------------


async def test_a_hundred_slow_calls_run_at_once_and_do_not_block_health(
    server: Server, instance: HttpInstance
) -> None:
    """AEnvironment W13: one slow sync function blocked everything."""
    arguments = {"key": uuid.uuid4().hex, "parties": 120}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(instance.call_tool("meet", arguments, 30.0)) for _ in range(119)]
        await instance.call_function("reset", {})
        assert (await instance.check_health(timeout_s=5.0))["data"]["status"] == "healthy"
        assert not any(call.done() for call in calls)
        last = await instance.call_tool("meet", arguments, 30.0)
    assert last.data == 120
    assert all(call.result().data == 120 for call in calls)


async def test_disconnecting_cancels_a_function(server: Server, tmp_path: Path) -> None:
    """Invariant 11: cancelling a call cancels it."""
    arguments = {"seconds": 30, "marker": str(tmp_path / "call")}
    async with httpx.AsyncClient(timeout=30) as client:
        call = asyncio.create_task(client.post(f"{server.url}/functions/pause", json=arguments))
        await eventually((tmp_path / "call.began").exists, "the function began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await eventually((tmp_path / "call.stopped").exists, "the function was told")


async def test_disconnecting_cancels_a_tool_called_without_a_session(
    server: Server, tmp_path: Path
) -> None:
    """Invariant 11: cancelling a call cancels it."""
    arguments = {"marker": str(tmp_path / "call")}
    params = {"name": "until_stopped", "arguments": arguments}
    call = asyncio.create_task(plain_mcp(server, "tools/call", params))
    await eventually((tmp_path / "call.began").exists, "the tool began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually((tmp_path / "call.stopped").exists, "the tool was told")


# --- our client ----------------------------------------------------------------------------------


async def test_instance_results(instance: HttpInstance) -> None:
    tools = await instance.list_tools()
    assert all({"name", "description", "inputSchema"} <= tool.keys() for tool in tools)
    assert (await instance.call_tool("add", {"a": 1, "b": 2})).data == 3
    picture = await instance.call_tool("picture", {})
    assert picture.content[0]["mimeType"] == "image/png"
    broken = await instance.call_tool("broken", {"text": "why"})
    assert broken.is_error
    assert broken.text() == "ValueError: why"
    assert (await instance.call_tool("huge", {})).meta["aenv/truncated"] is True


async def test_instance_refusals_are_typed(instance: HttpInstance) -> None:
    with pytest.raises(ToolNotFound, match="no tool 'nope'") as not_found:
        await instance.call_tool("nope", {})
    assert not_found.value.tool_name == "nope"
    with pytest.raises(ToolInputInvalid, match="b: Field required"):
        await instance.call_tool("add", {"a": 1})
    with pytest.raises(ToolTimeout):
        await instance.call_tool("nap", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(ToolTimeout):
        await instance.call_function("pause", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(FunctionFailed, match="the function failed"):
        await instance.call_function("fail", {})
    with pytest.raises(ToolInputInvalid):
        await instance.call_function("reset", {"seed": []})
    with pytest.raises(ToolNotFound):
        await instance.call_function("nope", {})
    with pytest.raises(FunctionFailed, match="no reward"):
        await instance.call_reward({}, name="broken-reward")
    assert (await instance.call_tool("add", {"a": 1, "b": 2})).data == 3


async def test_instance_finds_a_functions_own_endpoint_and_method(instance: HttpInstance) -> None:
    arguments = {"key": "k", "tags": ["a", "b"], "limit": 2}
    found = await instance.call_function("lookup", arguments)
    assert found == {"key": "k", "limit": 2, "exact": False, "tags": ["a", "b"]}
    assert await instance.call_function("lookup", {"key": "k"}, method="GET")
    assert await instance.call_function("set_note", {"note": "n"}) == "n"
    assert await instance.call_function("remove_note", {}) == "n"
    assert await instance.call_reward({"answer": "42"}) == {"score": 1.0}
    assert await instance.call_reward({"answer": "42"}, name="length") == 2.0
    assert (await instance.list_functions())["total"] > 8


async def test_one_failing_call_does_not_disturb_the_others(instance: HttpInstance) -> None:
    """AEnvironment W1: a failing call closed the connection of all others."""
    arguments = {"key": uuid.uuid4().hex, "parties": 2}
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(instance.call_tool("meet", arguments))
        failing = [
            group.create_task(_swallow(instance.call_tool("nap", {"seconds": 30}, 0.05)))
            for _ in range(10)
        ]
        done, _ = await asyncio.wait(failing)
        assert {type(task.result()) for task in done} == {ToolTimeout}
        await instance.call_tool("meet", arguments)
    assert waiting.result().data == 2


async def _swallow(call: Any) -> Exception | None:
    try:
        await call
    except Exception as exc:  # noqa: BLE001  # which one is what the tests ask
        return exc
    return None


async def test_cancelling_passes_and_tells_the_tool(instance: HttpInstance, tmp_path: Path) -> None:
    """Invariant 11: `CancelledError` is never swallowed, and the tool is told."""
    arguments = {"marker": str(tmp_path / "call")}
    call = asyncio.create_task(instance.call_tool("until_stopped", arguments))
    await eventually((tmp_path / "call.began").exists, "the tool began")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually((tmp_path / "call.stopped").exists, "the tool was told")


async def test_a_forgotten_session_is_opened_again_and_the_call_runs_once(
    server: Server, instance: HttpInstance
) -> None:
    """Invariant 1: no call runs a tool twice."""
    key = uuid.uuid4().hex
    assert (await instance.call_tool("count", {"key": key})).data == 1
    headers = instance._session._headers
    assert headers is not None
    async with httpx.AsyncClient() as client:
        await client.delete(f"{server.url}/mcp", headers=headers)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(instance.call_tool("count", {"key": key})) for _ in range(5)]
    assert sorted(call.result().data for call in calls) == [2, 3, 4, 5, 6]


async def test_a_server_that_dies_leaves_unknown_outcomes_then_is_lost(tmp_path: Path) -> None:
    """Design D6: a call whose outcome cannot be known is never sent again."""
    with serving(PROJECT, tmp_path) as server:
        instance = HttpInstance(server.url)
        await instance.wait_healthy(START_S)
        tool = asyncio.create_task(
            instance.call_tool("until_stopped", {"marker": str(tmp_path / "tool")})
        )
        function = asyncio.create_task(
            instance.call_function("pause", {"seconds": 30, "marker": str(tmp_path / "function")})
        )
        await eventually((tmp_path / "tool.began").exists, "the tool began")
        await eventually((tmp_path / "function.began").exists, "the function began")
        server.process.kill()
        for call in (tool, function):
            with pytest.raises(CallOutcomeUnknown, match="no answer"):
                await call
        server.process.wait()
        for call_again in (
            instance.call_tool("add", {"a": 1, "b": 1}),
            instance.call_function("reset", {}),
            instance.list_tools(),
            instance.check_health(),
        ):
            with pytest.raises(SandboxLost, match=server.url):
                await call_again
        await instance.close()
        never = HttpInstance(server.url)
        with pytest.raises(FabricUnavailable, match="no environment server answers"):
            await never.call_tool("add", {"a": 1, "b": 1})
        with pytest.raises(DeadlineExceeded, match="its last answer: no environment server"):
            await never.wait_healthy(0.1)
        await never.close()
        await never.close()


async def test_waiting_names_the_last_answer(instance: HttpInstance) -> None:
    """Invariant 9: every deadline error names what it waited for."""
    await instance.call_function("set_health", {"status": "starting"})
    try:
        with pytest.raises(DeadlineExceeded, match=r'not healthy within 0\.1 s.*"starting"'):
            await instance.wait_healthy(0.1)
    finally:
        await instance.call_function("set_health", {"status": "healthy"})
    assert (await instance.wait_healthy(5.0))["data"]["status"] == "healthy"


# --- the program ---------------------------------------------------------------------------------


async def test_a_project_that_does_not_load_is_served_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tools.py").write_text("import no_such_module_here\n")
    with serving(tmp_path, tmp_path) as server:
        instance = HttpInstance(server.url)
        for call in (
            instance.wait_healthy(START_S),
            instance.list_tools(),
            instance.call_tool("add", {}),
            instance.call_function("reset", {}),
            instance.call_reward({}),
        ):
            with pytest.raises(SandboxStartFailed, match="no_such_module_here"):
                await call
        await instance.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{server.url}/health")).status_code == 503


def _run(*flags: str, env: dict[str, str] | None = None, module: str = "aenv_ray.runtime") -> Any:
    return subprocess.run(
        [sys.executable, "-m", module, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )


def test_strict_ends_when_the_project_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("1/0\n")
    done = _run(str(tmp_path), "--strict", "--port", "0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_missing_project_is_an_error(tmp_path: Path) -> None:
    done = _run(str(tmp_path / "none"))
    assert done.returncode == 1
    assert "no such project" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    done = _run(str(PROJECT), "--host", "127.0.0.1", "--port", port)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_soon_whatever_runs(tmp_path: Path, number: int) -> None:
    with serving(PROJECT, tmp_path) as server:
        instance = HttpInstance(server.url)
        marker = str(tmp_path / "call")
        call = asyncio.create_task(instance.call_tool("until_stopped", {"marker": marker}))
        await eventually((tmp_path / "call.began").exists, "the tool began")
        assert await asyncio.to_thread(server.stop, number) == 0
        assert not server.socket.exists()
        assert isinstance(await _swallow(call), Exception)
        assert (tmp_path / "call.stopped").exists()
        await instance.close()


def test_images_start_it_by_aenvironments_name(tmp_path: Path) -> None:
    """Design D10: ``python -m aenv.main`` and ``from aenv import …`` work in images."""
    import aenv_ray.runtime

    shim = Path(aenv_ray.runtime.__file__).parent / "shim"
    (tmp_path / "tools.py").write_text(
        "from aenv import register_tool\n"
        "from aenv.core.tool import get_registry\n"
        "import aenv\n"
        "@register_tool\n"
        "def hello() -> str:\n"
        "    return 'hello'\n"
        "raise SystemError('loaded ' + ','.join(get_registry().tools))\n"
    )
    env = {"PYTHONPATH": str(shim)}
    flags = ["--host", "127.0.0.1", "--port", "0", "--name", "x", "--log-level", "INFO", "--strict"]
    done = _run(str(tmp_path), *flags, "--log-dir", "/tmp/x", env=env, module="aenv.main")
    assert "loaded hello" in done.stderr
    assert done.returncode == 1


def test_the_client_costs_no_import_of_the_protocol_libraries() -> None:
    code = "import sys, aenv_ray.client.over_http as c; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"fastmcp", "mcp", "ray", "starlette", "uvicorn"} & set(done.stdout.split())
