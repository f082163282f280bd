"""What a container says about itself: JSON objects, one a line, which may hold anything.

The programs of an image are its publisher's. What they send is limited in size and depth, and
nothing in it becomes a path or an argument before it was checked.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Final

MAX_REPORT_BYTES: Final = 1 << 20
"""More than the end of a log, which a report may contain."""
_PIECE_BYTES: Final = 65_536
_SHOWN: Final = 60


def parse_report(line: bytes | str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: It is too long, or not a JSON object.
    """
    shown = repr(line[:_SHOWN])
    if len(line) > MAX_REPORT_BYTES:
        raise ValueError(f"a report of more than {MAX_REPORT_BYTES >> 20} MiB: {shown}…")
    try:
        report = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not a report: {shown}") from exc
    if not isinstance(report, dict):
        raise ValueError(f"not a report: {shown}")  # of a peer, not of a caller
    return report


async def read_report(sock: socket.socket) -> dict[str, Any] | None:
    """Return the JSON object of the only line that a peer sends; None if it closed before.

    Raises:
        OSError: The connection broke.
        ValueError: What it sent is too long, or not a JSON object.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = await loop.sock_recv(sock, _PIECE_BYTES)
        if not piece:
            return None
        data += piece
        if len(data) > MAX_REPORT_BYTES:
            break
    return parse_report(bytes(data))
