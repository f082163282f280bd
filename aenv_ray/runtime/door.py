"""The fast door: MCP's JSON-RPC messages, one a line, over a Unix socket.

No HTTP, no event loop. The thread that reads a request also runs it, after handing the reading to
the next thread (leader and followers), so an answer costs no switch between threads.

Messages: requests as `dispatch` knows them, ``notifications/cancelled`` with ``requestId``, and
``notifications/progress`` back to callers whose ``_meta`` has a ``progressToken``.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Any, Final

import pydantic_core

from aenv_ray.runtime.dispatch import Dispatcher
from aenv_ray.runtime.faults import INVALID_REQUEST, PARSE_ERROR
from aenv_ray.runtime.results import to_json

MAX_THREADS: Final = 256
"""Calls of sync functions that run at once on one connection; more wait in order."""
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""A larger message ends the connection: it is a bug or an attack, not a call."""
_IDLE_THREADS: Final = 4
_READ_BYTES: Final = 262_144


class Connection:
    """One peer of the fast door; its calls run concurrently, answers come as they finish.

    Args:
        sock: Connected stream socket; owned from here on.
        dispatcher: Runs the calls.
    """

    def __init__(self, sock: socket.socket, dispatcher: Dispatcher) -> None:
        self._sock = sock
        self._dispatcher = dispatcher
        self._leader = threading.Lock()
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._waiting = 0
        self._threads = 0
        self._backlog: deque[dict[str, Any]] = deque()
        self._buffer = bytearray()
        self._scanned = 0
        self._call_ids: dict[Any, str] = {}
        self._closed = False

    def start(self) -> None:
        """Answer, in threads of its own, until the peer closes."""
        self._add_thread()

    def _add_thread(self) -> None:
        with self._state:
            self._threads += 1
            self._waiting += 1
        threading.Thread(target=self._work, name="aenv-door", daemon=True).start()

    def _work(self) -> None:
        while self._lead():
            pass
        with self._state:
            self._threads -= 1

    def _lead(self) -> bool:
        """Read one request and run it; False ends the thread."""
        with self._leader:
            if self._closed:
                return False
            message = self._read()
            if message is None:
                self._closed = True
                self._sock.close()
                return False
            with self._state:
                self._waiting -= 1
                alone = self._waiting == 0
                full = alone and self._threads >= MAX_THREADS
                if full:
                    # Keep reading, so that a cancellation behind the backlog still arrives.
                    self._waiting += 1
                    self._backlog.append(message)
                    return True
        if alone:
            self._add_thread()
        self._handle(message)
        while True:
            with self._state:
                if not self._backlog:
                    self._waiting += 1
                    if self._waiting > _IDLE_THREADS:
                        self._waiting -= 1
                        return False
                    return True
                message = self._backlog.popleft()
            self._handle(message)

    def _read(self) -> dict[str, Any] | None:
        """Return the next request; None at the end. Notifications are done here."""
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(self._buffer)
                if self._scanned > MAX_MESSAGE_BYTES:
                    return None
                try:
                    data = self._sock.recv(_READ_BYTES)
                except OSError:
                    return None
                if not data:
                    return None
                self._buffer += data
                continue
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            message = self._parse(line)
            if message is not None:
                return message

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = pydantic_core.from_json(line)
        except ValueError as exc:
            self._refuse(None, PARSE_ERROR, f"not JSON: {exc}")
            return None
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            self._refuse(None, INVALID_REQUEST, "not a JSON-RPC request")
            return None
        if message["method"] == "notifications/cancelled":
            params = message.get("params") or {}
            call_id = self._call_ids.get(params.get("requestId"))
            if call_id is not None:
                self._dispatcher.cancel(call_id, str(params.get("reason") or "the caller cancelled"))
            return None
        return message if "id" in message else None

    def _handle(self, message: dict[str, Any]) -> None:
        request_id = message["id"]
        params = message.get("params") or {}
        if not isinstance(params, dict):
            self._refuse(request_id, INVALID_REQUEST, "params is not an object")
            return
        meta = params.get("_meta") or {}
        call_id = meta.get("aenv/call_id")
        if call_id is not None:
            self._call_ids[request_id] = call_id
        prefix = b'{"jsonrpc":"2.0","id":' + to_json(request_id) + b","

        def on_outcome(outcome: bytes) -> None:
            self._call_ids.pop(request_id, None)
            self._send(prefix + outcome + b"}\n")

        token = meta.get("progressToken")
        if token is None:
            self._dispatcher.submit(message["method"], params, on_outcome)
            return

        def on_progress(progress: float, total: float | None, text: str | None) -> None:
            report = {"progressToken": token, "progress": progress}
            if total is not None:
                report["total"] = total
            if text is not None:
                report["message"] = text
            note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": report}
            self._send(to_json(note) + b"\n")

        self._dispatcher.submit(message["method"], params, on_outcome, on_progress)

    def _refuse(self, request_id: Any, code: int, message: str) -> None:
        error = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
        self._send(to_json(error) + b"\n")

    def _send(self, data: bytes) -> None:
        """Send; a peer that is gone loses nothing, for it asks again with the same call id."""
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            self._closed = True


def serve(listener: socket.socket, dispatcher: Dispatcher) -> None:
    """Accept and serve connections until the listener is closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        Connection(sock, dispatcher).start()
