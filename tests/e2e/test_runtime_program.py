"""The runtime as a program: what it says when it cannot start, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import SandboxStartFailed
from tests.e2e.serving import PROJECT, START_S, Server, eventually, serving, swallow

pytestmark = pytest.mark.e2e


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
        assert isinstance(await swallow(call), Exception)
        assert (tmp_path / "call.stopped").exists()
        await instance.close()


def test_images_start_it_by_aenvironments_name(tmp_path: Path) -> None:
    """``python -m aenv.main`` and ``from aenv import …`` work in images."""
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
