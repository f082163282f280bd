"""Serves the files of an application over HTTP, on the sandbox's loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit

MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "htm": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
    "ico": "image/x-icon",
    "woff2": "font/woff2",
    "wasm": "application/wasm",
    "txt": "text/plain; charset=utf-8",
    "md": "text/plain; charset=utf-8",
}
_ICON: Final = "favicon.ico"
"""Browsers ask for it unasked: its absence is not an error of the application."""
_REQUEST_TIMEOUT_S: Final = 10.0

Find = Callable[[str], bytes | None]
"""Returns the content of a file; None if there is none."""


def answer(find: Find, target: str) -> tuple[HTTPStatus, str, bytes]:
    """Return status, media type and body for the target of a GET request."""
    path = unquote(urlsplit(target).path).lstrip("/")
    if path.endswith("/") or not path:
        path += "index.html"
    content = find(path)
    if content is not None:
        kind = MEDIA_TYPES.get(path.rpartition(".")[2].lower(), "application/octet-stream")
        return HTTPStatus.OK, kind, content
    if path == _ICON:
        return HTTPStatus.NO_CONTENT, MEDIA_TYPES["ico"], b""
    message = f"{path} does not exist in this application\n"
    return HTTPStatus.NOT_FOUND, MEDIA_TYPES["txt"], message.encode()


class AppServer:
    """A running server.

    Args:
        find: Returns the content of a file.
        port: The port to listen on; 0 for a free one.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, find: Find, port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"find": staticmethod(find)})
        self._server = _Server(("127.0.0.1", port), handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the application, which ends with a slash."""
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore a browser that closes a connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_TIMEOUT_S
    find: Find

    def do_GET(self) -> None:
        """Answer with a file."""
        status, kind, body = answer(self.find, self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Write no log: the browser reports failed requests."""
