"""The terminal in the task's container: a shell on a pseudo-terminal, and its screen.

This program runs in the container, with a Python that is not the image's. ``start`` leaves a server
behind that holds the terminal; the other requests ask it. The agent can end the server: then it has
no terminal until the next request starts one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import sys
import termios
import time
from typing import Any

from screen import Screen

COLUMNS, ROWS = 160, 40
POLL_S = 0.02
QUIET_S = 0.15
"""Output is complete when nothing has arrived for this long."""
START_S = 10.0

KEYS = {
    "Enter": "\r", "Tab": "\t", "Escape": "\x1b", "Space": " ", "BSpace": "\x7f",
    "Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D", "BTab": "\x1b[Z",
    "Home": "\x1b[H", "End": "\x1b[F", "PageUp": "\x1b[5~", "PgUp": "\x1b[5~",
    "PageDown": "\x1b[6~", "PgDn": "\x1b[6~", "IC": "\x1b[2~", "DC": "\x1b[3~",
    "F1": "\x1bOP", "F2": "\x1bOQ", "F3": "\x1bOR", "F4": "\x1bOS", "F5": "\x1b[15~",
    "F6": "\x1b[17~", "F7": "\x1b[18~", "F8": "\x1b[19~", "F9": "\x1b[20~", "F10": "\x1b[21~",
    "F11": "\x1b[23~", "F12": "\x1b[24~",
}  # fmt: skip
"""Names of keys, as tmux has them."""


def encoded(key: str) -> bytes:
    """Return what a key sends; text that is not the name of a key is sent as it is."""
    if key in KEYS:
        return KEYS[key].encode()
    prefix, _, rest = key.partition("-")
    if prefix == "C" and len(rest) == 1 and "@" <= rest.upper() <= "_":
        return bytes([ord(rest.upper()) & 0x1F])
    if prefix == "M" and rest and (len(rest) == 1 or rest in KEYS):
        return b"\x1b" + encoded(rest)
    return key.encode("utf-8", "replace")


class Server:
    """Holds the terminal; answers one JSON line per connection."""

    def __init__(self, listener: socket.socket, request: dict[str, Any]) -> None:
        self._listener = listener
        self._screen = Screen(COLUMNS, ROWS)
        self._changed = time.monotonic()
        self._input = b""
        self._pid, self._master = pty.fork()
        if not self._pid:
            with contextlib.suppress(OSError):
                os.chdir(request["directory"])
            shell, variables = request["shell"], request["variables"]
            try:
                os.execvpe(shell[0], shell, {**variables, "TERM": "xterm", "COLORTERM": ""})
            finally:
                os._exit(127)
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        os.set_blocking(self._master, False)

    def serve(self) -> None:
        """Serve until the shell has ended."""
        while True:
            wanted = [self._master] if self._input else []
            readable, writable, _ = select.select([self._master, self._listener], wanted, [])
            if self._master in readable and not self._read():
                return
            if writable:
                self._write()
            if self._listener in readable:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError, ValueError):
                    connection.settimeout(1.0)
                    request = json.loads(received(connection))
                    connection.sendall(json.dumps(self._answer(request)).encode() + b"\n")

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._screen.feed(data)
        self._input += "".join(self._screen.replies).encode()
        self._screen.replies.clear()
        self._changed = time.monotonic()
        return bool(data)

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._input = self._input[os.write(self._master, self._input[:4096]) :]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        keys = b"".join(map(encoded, request.get("keys", ())))
        if keys:
            self._input += keys
            self._changed = time.monotonic()
        history = bool(request.get("history"))
        quiet_s = time.monotonic() - self._changed
        return {
            "screen": self._screen.text(history=history),
            "quiet_s": 0.0 if self._input else quiet_s,
            "is_idle": os.tcgetpgrp(self._master) == self._pid,
        }


def received(connection: socket.socket) -> bytes:
    """Return one line."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = connection.recv(65536)
        if not piece:
            break
        data += piece
    return bytes(data)


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server.

    Raises:
        OSError: There is none.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(START_S)
        connection.connect(f"\0{name}")
        connection.sendall(json.dumps(request).encode() + b"\n")
        return dict(json.loads(received(connection)))


def start(name: str, request: dict[str, Any]) -> None:
    """Start a server, unless there is one."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return
    listener.listen(16)
    if os.fork():
        listener.close()
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Server(listener, request).serve()
    os._exit(0)


def play(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send keys, wait, and return the screen.

    With ``until_idle`` the wait ends once the shell waits for a command, else after ``wait_s``.
    """
    deadline = time.monotonic() + request["wait_s"]
    answer = ask(name, {"keys": request["keys"]})
    while time.monotonic() < deadline:
        time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        answer = ask(name, {})
        if request["until_idle"] and answer["is_idle"] and answer["quiet_s"] > QUIET_S:
            break
    return ask(name, {"history": request["history"]})


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    name = request["name"]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    start(name, request)
    sys.stdout.write(json.dumps(play(name, request)))


if __name__ == "__main__":
    main()
