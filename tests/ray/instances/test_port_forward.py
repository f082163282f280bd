"""A port of this machine leads to a server inside an instance, which has no network."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.integrations.support.port_forward import PortForward
from tests.ray.gateway.test_data_ports import SOURCE


async def test_connections_reach_the_server_and_end_with_the_forward(
    make: Any, tmp_path: Path
) -> None:
    root = tmp_path / "server"
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text(
        json.dumps({"name": "server", "deployConfig": {"network": "none"}})
    )
    (root / "src" / "tools.py").write_text(SOURCE)
    env = AsyncEnvHandle(make(root))
    forward = PortForward(env.handle, 8123)
    url = f"http://127.0.0.1:{await forward.open()}"
    async with httpx.AsyncClient(timeout=30) as http:
        with pytest.raises(httpx.TransportError):  # nothing listens inside yet
            await http.get(url)
        await env.call_tool("serve", {"port": 8123}, 30.0)
        body = b"x" * 700_000  # more than a piece
        async with asyncio.TaskGroup() as group:
            posts = [group.create_task(http.post(f"{url}/here", content=body)) for _ in range(4)]
        for post in posts:
            answer = post.result()
            assert (answer.status_code, answer.headers["x-told"]) == (201, "yes")
            assert json.loads(answer.text)["length"] == len(body)
        await forward.close()
        await forward.close()
        with pytest.raises(httpx.TransportError):
            await http.get(url)
    await env.close()
