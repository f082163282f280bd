"""What a runtime asks of its host over the fast door: its second container."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pydantic_core

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import AenvError, ConfigError, to_wire

METHOD: Final = "aenv/second"
ALLOWED: Final = frozenset({"aenv/exec", "aenv/read_file", "aenv/write_file"})
"""What environment code may have done in its second container."""
_GRACE_S: Final = 5.0
_LONGEST_S: Final = 86_400.0


class RuntimeRequests:
    """Answers one runtime, whose code is not trusted with more than is allowed here.

    Args:
        send: Sends a line to the runtime.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.second: Sandbox | None = None
        """The second container; None for an instance without one."""

    def take(self, message: dict[str, Any]) -> bool:
        """Answer a request in time, or stop one that is under way; False for any other message."""
        params = message.get("params") or {}
        if message.get("method") == "notifications/cancelled":
            task = self._tasks.get(str(params.get("requestId")))
            if task is not None:
                task.cancel()
            return True
        if "id" not in message:
            return False
        request_id = str(message["id"])
        task = asyncio.get_running_loop().create_task(self._answer(request_id, message))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))
        return True

    def stop(self) -> None:
        """Answer nobody any more."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _answer(self, request_id: str, message: dict[str, Any]) -> None:
        head = b'{"jsonrpc":"2.0","id":' + pydantic_core.to_json(request_id)
        try:
            result = await self._run(str(message.get("method")), message.get("params") or {})
        except AenvError as exc:
            error = {"code": -32000, "message": exc.message, "data": to_wire(exc)}
            self._send(head + b',"error":' + pydantic_core.to_json(error) + b"}\n")
            return
        self._send(head + b',"result":' + result + b"}\n")

    async def _run(self, method: str, params: dict[str, Any]) -> bytes:
        wanted, inner = params.get("method"), params.get("params")
        if method != METHOD or wanted not in ALLOWED or not isinstance(inner, dict):
            raise ConfigError(f"a runtime cannot ask its host for {wanted or method!r}")
        if self.second is None:
            raise ConfigError(
                "the instance has no second container",
                hint='set deployConfig.podTemplate to "DualContainer" and run it with an engine '
                "that has second containers: docker",
            )
        timeout_s = (inner.get("_meta") or {}).get("aenv/timeout_s")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
            raise ConfigError(f"timeout {timeout_s!r} is not a number of seconds above zero")
        return await self.second.request_json(
            wanted, pydantic_core.to_json(inner), deadline_s=timeout_s + _GRACE_S
        )
