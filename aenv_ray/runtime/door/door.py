"""The fast door: MCP's JSON-RPC messages, one a line, over a Unix socket.

No HTTP, no event loop. The thread that reads a request also runs it, so an answer costs no switch
between threads. Who reads meanwhile depends on the function: one that was quick so far, or is not
known yet, is run by the *leader*, the one thread that reads, before it reads on; for any other the
leader first hands the reading to a *follower*. A function that turns out to be slow is noticed by
the `Relief`, which puts a follower in the leader's place.

Messages: requests as `dispatch` knows them, ``notifications/cancelled`` with ``requestId``, and
``notifications/progress`` back to callers whose ``_meta`` has a ``progressToken``.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import pydantic_core

from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.host_link import HOST
from aenv_ray.runtime.door.relief import Relief
from aenv_ray.runtime.faults import INVALID_REQUEST, SERVER_ERROR, unread
from aenv_ray.runtime.system.threads import has_children, process_limits, start_thread

MAX_THREADS: Final = 256
"""Calls of sync functions that run at once on one connection; more wait in order."""
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""A larger message ends the connection: it is a bug or an attack, not a call."""
QUICK_S: Final = 0.0005
"""A function whose last call took less than this is run by the leader."""
_IDLE_THREADS: Final = 4
_READ_BYTES: Final = 65_536
"""Below the size from which malloc asks the kernel for each buffer."""
_FLUSH_BYTES: Final = 65_536
_PASSING: Final = {
    errno.ECONNABORTED,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
}
"""Why a connection cannot be accepted now, though one can be later."""
_PASSING_PAUSE_S: Final = 0.05


class Connection:
    """One peer of the fast door; its calls run concurrently, answers come as they finish.

    Args:
        sock: Connected stream socket; owned from here on.
        dispatcher: Runs the calls.
    """

    def __init__(self, sock: socket.socket, dispatcher: Dispatcher) -> None:
        self._sock = sock
        self._dispatcher = dispatcher
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        """The same lock, to wait with; taking it directly costs a quick call less."""
        self._sending = threading.Lock()
        self._leader: int | None = None
        self._waiting = 0
        self._threads = 0
        self._backlog: deque[Callable[[], None]] = deque()
        self._buffer = bytearray()
        self._scanned = 0
        self._call_ids: dict[Any, str] = {}
        self._cancelled: set[Any] = set()
        self._quick: dict[str, bool] = {}
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._closed = False
        self._relief = Relief(self)
        self._inline_kind = ""
        self.inline_since: float | None = None
        """When the leader began the call that it runs itself; None while it reads."""

    def start(self) -> None:
        """Answer, in threads of its own, until the peer closes."""
        HOST.attach(self)  # before the first call, which may want it
        if not self._add_thread():
            text = f"it cannot start a thread to serve this connection ({process_limits()})"
            # With the id last, since the peer takes a line that begins with an id for a result.
            error = {"jsonrpc": "2.0", "error": {"code": SERVER_ERROR, "message": text}, "id": None}
            self._send(to_json(error) + b"\n")
            self._close()  # the peer may connect again

    def send(self, line: bytes) -> None:
        """Ask the peer; if the leader does so in a call, somebody else reads the answer."""
        since = self.inline_since
        if since is not None and self._leader == threading.get_ident():
            self.relieve(since)
        self._send(line)

    # --- threads ------------------------------------------------------------------------------

    def _add_thread(self) -> bool:
        """Start another thread; False where the sandbox's limits allow none now."""
        with self._state:
            self._threads += 1
        try:
            start_thread(self._work)
        except RuntimeError:  # of `_thread`: out of processes, or of memory for a stack
            with self._state:
                self._threads -= 1
            return False
        return True

    def _work(self) -> None:
        me = threading.get_ident()
        while self._take_part(me):
            # What waits goes before what is still to be read, where another thread can read on.
            if self._leader == me and not (self._backlog and self._give_up_lead()):
                message = self._lead(me)
                if message is not None:
                    self._handle(message, _kind(message))
            while (run := self._from_backlog()) is not None:
                run()
        with self._state:
            self._threads -= 1
            is_last = self._closed and not self._threads
        if is_last:
            self._sock.close()  # a failed send ends the connection without a leader to close it

    def _from_backlog(self) -> Callable[[], None] | None:
        with self._lock:
            return self._backlog.popleft() if self._backlog else None

    def _take_part(self, me: int) -> bool:
        """Wait for the lead, or for a call in the backlog; False when this thread is to end."""
        with self._state:
            # A thread that ends hands its children to the main thread, which reaps orphans.
            if self._waiting >= _IDLE_THREADS and not has_children():
                return False
            self._waiting += 1
            while self._leader is not None and not self._backlog and not self._closed:
                self._state.wait()
            self._waiting -= 1
            if self._closed:
                return False
            if self._leader is None:
                self._leader = me
            return True

    def _give_up_lead(self) -> bool:
        """Let another thread read on; False when there is none and can be none."""
        if not self._has_follower():
            return False
        with self._state:
            self._leader = None
            self._state.notify()
        return True

    def _has_follower(self) -> bool:
        """Whether a thread waits to lead, one being started where there is none.

        Before the lead is given up: without anybody to take it, no call would be read any more.
        """
        with self._state:
            if self._waiting:
                return True
            if self._threads >= MAX_THREADS:
                return False
        return self._add_thread()

    def relieve(self, since: float) -> None:
        """Put another thread in the place of a leader that still runs the call begun at `since`."""
        if self.inline_since != since or not self._has_follower():
            return
        with self._state:
            if self.inline_since != since or self._leader is None:
                return
            self.inline_since = None
            self._leader = None
            self._quick[self._inline_kind] = False
            lines, self._outbox, self._outbox_bytes = self._outbox, [], 0
            self._state.notify()
        if lines:
            self._send(b"".join(lines))

    def _close(self) -> None:
        with self._state:
            self._closed = True
            self._leader = None
            self._state.notify_all()
        HOST.detach(self)
        self._sock.close()

    # --- reading ------------------------------------------------------------------------------

    def _lead(self, me: int) -> dict[str, Any] | None:
        """Read, running quick calls on the way; return a call to run after the lead was given up.

        None means that the lead was lost, or the connection has ended.
        """
        while True:
            message = self._next_buffered()
            if message is None:
                self._send_outbox()
                message = self._read()
            if message is None:
                self._close()
                return None
            kind = _kind(message)
            if self._quick.get(kind, True):
                if not self._run_inline(message, kind, me):
                    return None
                continue
            self._send_outbox()
            if self._give_up_lead():
                return message
            if self._threads == 1:
                # Nobody else is there to run it, and nobody can be: what is behind it waits.
                if not self._run_inline(message, kind, me):
                    return None
                continue
            # Every thread is busy: read on, so that a cancellation behind this still arrives.
            self._handle(message, kind, waits=True)

    def _run_inline(self, message: dict[str, Any], kind: str, me: int) -> bool:
        """Run a quick call as the leader; False when it was relieved meanwhile."""
        self._inline_kind = kind
        self.inline_since = time.monotonic()
        self._relief.wake()
        self._handle(message, kind)
        with self._lock:
            if self._leader != me:
                return False
            self.inline_since = None
        if self._outbox_bytes > _FLUSH_BYTES:
            self._send_outbox()
        return True

    def _next_buffered(self) -> dict[str, Any] | None:
        """Return the next complete request that was read already."""
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(self._buffer)
                return None
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            message = self._parse(line)
            if message is not None:
                return message

    def _read(self) -> dict[str, Any] | None:
        """Wait for the next request; None at the end of the connection."""
        while self._scanned <= MAX_MESSAGE_BYTES:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data
            message = self._next_buffered()
            if message is not None:
                return message
        return None

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Return a request; what is none is refused, a notification is done here."""
        try:
            message = pydantic_core.from_json(line)
        except ValueError as exc:
            self._send(to_json(unread(line, exc)) + b"\n")
            return None
        if isinstance(message, dict) and "method" not in message and "id" in message:
            HOST.on_answer(message)
            return None
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            self._refuse(None, INVALID_REQUEST, "not a JSON-RPC request")
            return None
        if message["method"] == "notifications/cancelled":
            params = message.get("params") or {}
            call_id = self._call_ids.get(params.get("requestId"))
            reason = str(params.get("reason") or "the caller cancelled")
            if call_id is not None and not self._dispatcher.cancel(call_id, reason):
                self._cancelled.add(params["requestId"])  # read, but not begun yet
            return None
        if "id" not in message:
            return None
        params = message.get("params")
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and meta.get("aenv/call_id") is not None:
            self._call_ids[message["id"]] = meta["aenv/call_id"]
        return message

    # --- answering ----------------------------------------------------------------------------

    def _handle(self, message: dict[str, Any], kind: str, *, waits: bool = False) -> None:
        request_id = message["id"]
        params = message.get("params") or {}
        if not isinstance(params, dict):
            self._refuse(request_id, INVALID_REQUEST, "params is not an object")
            return
        meta = params.get("_meta") or {}
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            self._call_ids.pop(request_id, None)
            self._refuse(request_id, SERVER_ERROR, "the call was cancelled before it began")
            return
        prefix = b'{"jsonrpc":"2.0","id":' + to_json(request_id) + b","
        # What has to wait may get its outcome while the leader, or nobody, looks at the outbox.
        me = 0 if waits else threading.get_ident()

        def on_outcome(outcome: bytes) -> None:
            self._call_ids.pop(request_id, None)
            self._cancelled.discard(request_id)
            line = prefix + outcome + b"}\n"
            with self._lock:
                inline = threading.get_ident() == me == self._leader
                if inline:
                    # It goes out with the answers of what was read with it.
                    self._outbox.append(line)
                    self._outbox_bytes += len(line)
            if not inline:
                self._send(line)

        token = meta.get("progressToken")
        if waits:
            progress = None if token is None else self._progress_sender(token)
            run = self._dispatcher.accept(message["method"], params, on_outcome, progress)
            if run is not None:
                with self._state:
                    self._backlog.append(run)
                    self._state.notify()  # a thread may have become free meanwhile
            return
        started = time.perf_counter()
        if token is None:
            self._dispatcher.submit(message["method"], params, on_outcome)
        else:
            self._dispatcher.submit(
                message["method"], params, on_outcome, self._progress_sender(token)
            )
        self._quick[kind] = time.perf_counter() - started < QUICK_S

    def _progress_sender(self, token: Any) -> Any:
        def on_progress(progress: float, total: float | None, text: str | None) -> None:
            report = {"progressToken": token, "progress": progress}
            if total is not None:
                report["total"] = total
            if text is not None:
                report["message"] = text
            note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": report}
            self._send(to_json(note) + b"\n")

        return on_progress

    def _refuse(self, request_id: Any, code: int, message: str) -> None:
        error = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
        self._send(to_json(error) + b"\n")

    def _send_outbox(self) -> None:
        if not self._outbox_bytes:
            return
        with self._lock:
            lines, self._outbox, self._outbox_bytes = self._outbox, [], 0
        self._send(b"".join(lines))

    def _send(self, data: bytes) -> None:
        """Send; a peer that is gone loses nothing, for it asks again with the same call id."""
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            self._closed = True

    @property
    def is_closed(self) -> bool:
        """Whether the peer is gone."""
        return self._closed


def _kind(message: dict[str, Any]) -> str:
    """Return what a request's duration depends on: the method and the function it names."""
    params = message.get("params")
    name = params.get("name") if isinstance(params, dict) else None
    return f"{message['method']} {name}"


def serve(accept: Callable[[], socket.socket], dispatcher: Dispatcher) -> None:
    """Serve each connection that `accept` waits for, until its listener is closed."""
    while True:
        try:
            sock = accept()
        except OSError as exc:
            if exc.errno not in _PASSING:
                return
            time.sleep(_PASSING_PAUSE_S)  # a tool may have opened all files that it may open
            continue
        Connection(sock, dispatcher).start()
