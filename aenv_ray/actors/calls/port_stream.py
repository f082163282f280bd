"""A connection to a port inside an instance, which accepts no connections from the network.

The instance's runtime connects inside, and the bytes travel as calls of the fast door.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.actors.calls.json_calls import InstanceCalls, JsonCall
from aenv_ray.engines.base import read_json
from aenv_ray.runtime.door.async_calls import Disconnect

PIECE_BYTES: Final = 256 * 1024
_CALL_S: Final = 75.0
"""Longer than the runtime waits for a server that accepts no bytes."""


class PortStream:
    """A connection to a port inside an instance."""

    def __init__(self, calls: InstanceCalls, instance_id: str) -> None:
        self._calls = calls
        self._instance_id = instance_id
        self._connection = ""

    async def open(self, port: int) -> None:
        """Connect.

        Raises:
            PortUnreachable: No server listens on the port.
        """
        self._connection = (await self._call("aenv/port_open", {"port": port}))["connection"]

    async def read(self) -> bytes:
        """Return the next bytes; b"" at the end."""
        while True:
            told = await self._call("aenv/port_read", {})
            if told["data"] or told["ended"]:
                return base64.b64decode(told["data"])

    async def write(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            PortUnreachable: The server closed the connection.
        """
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self._call("aenv/port_write", {"data": base64.b64encode(piece).decode()})

    async def close(self) -> None:
        """Close the connection."""
        if self._connection:
            await self._call("aenv/port_close", {})

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        own = {"connection": self._connection} if self._connection else {}
        params = {"arguments": {**own, **arguments}}
        call = JsonCall(self._instance_id, method, params, {"aenv/timeout_s": _CALL_S})
        result = read_json(await self._calls.call(call, Disconnect()))
        data: dict[str, Any] = result["data"]
        return data
