"""AEnvironment: its server for each environment, and its client without the Kubernetes service.

The client only knows port 8081, so each server has an address of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from aenv import Environment
from protocol import Peer, ended, listening, python, run

SOURCE = """from aenv import register_tool

@register_tool
def echo(text: str) -> str:
    return text
"""


class AEnvironment(Peer):
    """See `Peer`."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory()
        self._source = Path(self._root.name, "echo")
        self._source.mkdir()
        Path(self._source, "echo.py").write_text(SOURCE, encoding="utf-8")
        self._numbers = itertools.count(256)

    async def create(self) -> Any:
        number = next(self._numbers)
        address = f"127.1.{number // 250}.{number % 250 + 1}"
        command = [python(), "-m", "aenv.main", str(self._source), "--host", address]
        server = await asyncio.create_subprocess_exec(
            *command, "--port", "8081", cwd=self._root.name,
            env={**os.environ, "HOME": self._root.name},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await listening(address, 8081)
        os.environ["DUMMY_INSTANCE_IP"] = address
        env = Environment("echo@1.0.0")
        await env.initialize()
        return env, server

    async def call(self, env: Any) -> None:
        result = await env[0].call_tool("echo", {"text": "hi"})
        assert not result.is_error

    async def release(self, env: Any) -> None:
        await env[0].release()
        await ended(env[1])

    async def close(self) -> None:
        self._root.cleanup()


if __name__ == "__main__":
    run(AEnvironment())
