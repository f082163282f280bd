"""A server inside the sandbox, for the contract's connections to ports."""

from __future__ import annotations

import base64
import hashlib
import http.server
import struct
import threading
from io import BufferedIOBase

from aenv_ray.runtime import register_tool

_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 adds it to the client's key."""
_CLOSE = 8


class _Handler(http.server.BaseHTTPRequestHandler):
    """Returns bodies backwards, and WebSocket messages as they came; greets those first."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer with the body backwards."""
        body = self.rfile.read(int(self.headers["content-length"]))[::-1]
        self.send_response(201)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-path", self.path)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Upgrade, and echo until the client closes."""
        key = self.headers["sec-websocket-key"].encode()
        accepted = base64.b64encode(hashlib.sha1(key + _WEBSOCKET).digest()).decode()
        self.send_response(101)
        for name, value in (("upgrade", "websocket"), ("connection", "upgrade")):
            self.send_header(name, value)
        self.send_header("sec-websocket-accept", accepted)
        self.end_headers()
        self.close_connection = True
        kind, data = 1, b"welcome"
        while True:
            self.wfile.write(bytes([0x80 | kind, 127]) + struct.pack(">Q", len(data)) + data)
            if kind == _CLOSE:
                return
            kind, data = _frame(self.rfile)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _frame(file: BufferedIOBase) -> tuple[int, bytes]:
    """Read one whole message of a client: its kind and its data."""
    kind, length = file.read(2)
    length &= 0x7F
    if length >= 126:
        form = ">H" if length == 126 else ">Q"
        (length,) = struct.unpack(form, file.read(struct.calcsize(form)))
    mask = file.read(4)
    data = file.read(length)
    mask *= length // 4 + 1
    return kind & 0x0F, (
        int.from_bytes(data, "big") ^ int.from_bytes(mask[:length], "big")
    ).to_bytes(length, "big")


@register_tool
def serve(address: str) -> int:
    """Start the server on a loopback address; return its port."""
    server = http.server.ThreadingHTTPServer((address, 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
