"""The fast door: MCP's JSON-RPC messages, one per line, over a Unix socket.

No HTTP and no event loop. Each connection has a leader/followers thread pool: the *leader* is the
one thread that reads. It runs a function itself when the last call of that function was quick, or
when there was none yet, so that an answer costs no switch between threads. Before it runs a slow
function it hands the lead to a *follower*, which reads on. `_LeaderMonitor`, one for all
connections of the process, replaces a leader whose function turns out to be slow.

Messages: the requests that `dispatch` runs, ``notifications/cancelled`` with ``requestId``, and
``notifications/progress`` to callers whose ``_meta`` has a ``progressToken``. Callers may also take
log messages and requests (see `caller_link`). The first message may be ``aenv/hello``, which limits
what the peer may call (see `roles`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import pydantic_core

from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.caller_link import NOTE, OFFERS, LinkedCaller, Note
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.host.link import HOST
from aenv_ray.runtime.door.outcomes import key_of
from aenv_ray.runtime.door.roles import HELLO, DoorRole, check_method, role_of, scope_meta
from aenv_ray.runtime.door.subscriptions import SESSION, SUBSCRIPTIONS, update_note
from aenv_ray.runtime.faults import INVALID_REQUEST, SERVER_ERROR, Fault, unread
from aenv_ray.runtime.system.threads import (
    has_children,
    limit_stacks,
    process_limits,
    start_thread,
)

MAX_THREADS: Final = 256
"""Calls of sync functions that run at once on one connection; more wait in order."""
MAX_MESSAGE_BYTES: Final = 128 * 1024 * 1024
"""A larger message ends the connection: it is a bug or an attack, not a call."""
QUICK_S: Final = 0.0005
"""The leader runs a function whose last call took less than this."""
MONITOR_S: Final = 0.02
"""How often a leader that runs calls is checked; a stuck one is replaced within two checks."""
_IDLE_CHECKS: Final = 30
"""After this many checks of a leader that only reads, the monitor sleeps."""
_IDLE_THREADS: Final = 4
_READ_BYTES: Final = 65_536
"""Below the size from which malloc asks the kernel for each buffer."""
_FLUSH_BYTES: Final = 65_536
_TEMPORARY_ERRORS: Final = {
    errno.ECONNABORTED,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
}
"""Errors of ``accept`` after which it can succeed later."""
_ACCEPT_RETRY_S: Final = 0.05


class IdleConnections(Protocol):
    """Watches connections that have no thread, for processes with thousands of connections."""

    def watch(self, connection: Connection, fileno: int) -> None:
        """Have a thread call `Connection.serve` once the socket `fileno` can be read.

        Raises:
            OSError: It cannot be watched.
        """


class Connection:
    """One peer of the fast door; its calls run concurrently and are answered as they finish.

    Args:
        sock: Connected stream socket; the connection closes it.
        dispatcher: Runs the calls.
        idle: Watches the socket while there is no request, so that no thread waits for one. None: a
            thread waits.
    """

    def __init__(
        self,
        sock: socket.socket,
        dispatcher: Dispatcher,
        idle: IdleConnections | None = None,
    ) -> None:
        self._idle = idle
        self._is_idle = False
        """Whether `idle` watches it, so that it needs no leader."""
        self._sock = sock
        self._dispatcher = dispatcher
        self._role: DoorRole | None = None
        """None until the first message."""
        self._lock = threading.Lock()
        """Guards the threads, the lead and the outbox. A quick call takes it directly, which costs
        less than through the condition."""
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None
        self._followers = 0
        """Threads that wait to lead."""
        self._threads = 0
        self._backlog: deque[Callable[[], None]] = deque()
        """Calls that wait for a thread, while all of them are busy."""
        self._is_quick: dict[str, bool] = {}
        """By kind of request: whether the leader runs it."""
        self.is_watched = False
        """Whether the monitor checks the leader."""
        self._inline_kind = ""
        self.inline_since: float | None = None
        """When the leader began the call that it runs itself; None while it reads."""

        self._buffer = bytearray()
        self._scanned = 0
        """No line ends before this index of the buffer."""
        self._keys: dict[Any, str] = {}
        self._cancelled: set[Any] = set()
        """Requests that were cancelled before they began."""
        self._outbox: list[bytes] = []
        """The leader's answers, until it has run all that it has read."""
        self._outbox_bytes = 0
        self._sending = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Answer requests in background threads until the peer closes the connection."""
        if not self._become_idle() and not self._add_thread():
            text = f"it cannot start a thread to serve this connection ({process_limits()})"
            # With the id last, since the peer takes a line that begins with an id for a result.
            error = {"jsonrpc": "2.0", "error": {"code": SERVER_ERROR, "message": text}, "id": None}
            self._send(to_json(error) + b"\n")
            self._close()  # the peer may connect again

    def send(self, line: bytes) -> None:
        """Send a request to the peer; a leader that does so in a call gives up the lead first."""
        since = self.inline_since
        if since is not None and self._leader == threading.get_ident():
            self.replace_leader(since)
        self._send(line)

    @property
    def is_closed(self) -> bool:
        """Whether the peer is gone."""
        return self._closed

    def serve(self) -> None:
        """Read and run requests in this thread, after `IdleConnections.watch`."""
        with self._lock:
            self._is_idle = False
            self._threads += 1
        self._work()

    def _become_idle(self) -> bool:
        """Give up the lead until there is something to read; False if this thread has to wait."""
        if self._idle is None or has_children():
            return False
        with self._changed:
            if self._closed or self._backlog:
                return False
            before, self._leader, self._is_idle = self._leader, None, True
            self._changed.notify_all()
        try:
            self._idle.watch(self, self._sock.fileno())
        except (OSError, ValueError):  # out of memory for it, or it was closed meanwhile
            with self._lock:
                self._leader, self._is_idle = before, False
            return False
        return True

    # --- threads and the lead -----------------------------------------------------------------

    def _add_thread(self) -> bool:
        """Start another thread; False where the sandbox's limits allow none now."""
        with self._lock:
            self._threads += 1
        try:
            start_thread(self._work)
        except RuntimeError:  # from `_thread`: no process, or no memory for a stack, is left
            with self._lock:
                self._threads -= 1
            return False
        return True

    def _work(self) -> None:
        me = threading.get_ident()
        while self._wait_for_work(me):
            # The backlog comes before new requests, if another thread can read on.
            if self._leader == me and not (self._backlog and self._give_up_lead()):
                message = self._lead(me)
                if message is not None:
                    self._handle(message, _kind(message))
            while (run := self._from_backlog()) is not None:
                run()
        with self._lock:
            self._threads -= 1
            is_last = self._closed and not self._threads
        if is_last:
            self._sock.close()  # after a failed send no leader is there to close it

    def _wait_for_work(self, me: int) -> bool:
        """Wait for the lead or a call in the backlog; False when this thread is to end."""
        with self._changed:
            # When a thread ends, its children pass to the main thread, which reaps orphans.
            if self._followers >= _IDLE_THREADS and not has_children():
                return False
            self._followers += 1
            while self._may_wait():
                self._changed.wait()
            self._followers -= 1
            if self._closed or self._is_idle:
                return False
            if self._leader is None:
                self._leader = me
            return True

    def _may_wait(self) -> bool:
        """Whether there is nothing to do, and this thread is to stay."""
        if self._backlog or self._closed:
            return False
        if self._is_idle:
            return has_children()
        return self._leader is not None

    def _from_backlog(self) -> Callable[[], None] | None:
        with self._lock:
            return self._backlog.popleft() if self._backlog else None

    def _give_up_lead(self) -> bool:
        """Let another thread read on; False when there is none and none can be started."""
        if not self._has_follower():
            return False
        with self._changed:
            self._leader = None
            self._changed.notify()
        return True

    def _has_follower(self) -> bool:
        """Whether a thread waits to lead; starts one if necessary.

        The lead is given up only after this: without a follower nothing would be read any more.
        """
        with self._lock:
            if self._followers:
                return True
            if self._threads >= MAX_THREADS:
                return False
        return self._add_thread()

    def replace_leader(self, since: float) -> None:
        """Give the lead to another thread if the leader still runs the call begun at `since`."""
        if self.inline_since != since or not self._has_follower():
            return
        with self._changed:
            if self.inline_since != since or self._leader is None:
                return
            self.inline_since = None
            self._leader = None
            self._is_quick[self._inline_kind] = False
            self._changed.notify()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._leader = None
            self._changed.notify_all()
        HOST.detach(self)
        self._sock.close()

    # --- what the leader does -----------------------------------------------------------------

    def _lead(self, me: int) -> dict[str, Any] | None:
        """Read, and run quick calls; return a slow call, to be run after the lead was given up.

        None means that the lead was lost or given up, or that the connection has ended.
        """
        self._flush_outbox()  # answers of a leader that was replaced, maybe by the monitor
        while True:
            message = self._next_buffered()
            if message is None:
                self._flush_outbox()
                message = self._read()
            if message is None:
                if self._leader == me:
                    self._close()
                return None
            kind = _kind(message)
            if self._is_quick.get(kind, True):
                if not self._run_inline(message, kind, me):
                    return None
                continue
            self._flush_outbox()
            if self._give_up_lead():
                return message
            if self._threads == 1:
                # No other thread exists, nor can one be started: requests behind this one wait.
                if not self._run_inline(message, kind, me):
                    return None
                continue
            # Every thread is busy. Read on, so that a cancellation behind this request arrives.
            self._handle(message, kind, waits=True)

    def _run_inline(self, message: dict[str, Any], kind: str, me: int) -> bool:
        """Run a call as the leader; False when this thread lost the lead meanwhile."""
        self._inline_kind = kind
        self.inline_since = time.monotonic()
        if not self.is_watched:
            _monitor.watch(self)
        self._handle(message, kind)
        with self._lock:
            if self._leader != me:
                return False
            self.inline_since = None
        if self._outbox_bytes > _FLUSH_BYTES:
            self._flush_outbox()
        return True

    # --- reading ------------------------------------------------------------------------------

    def _next_buffered(self) -> dict[str, Any] | None:
        """Return the next complete request in the buffer."""
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
        """Wait for the next request; None at the end of the connection, or when it became idle."""
        may_be_idle = self._idle is not None
        while self._scanned <= MAX_MESSAGE_BYTES:
            try:
                data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT if may_be_idle else 0)
            except BlockingIOError:
                if self._become_idle():
                    return None
                may_be_idle = False
                continue
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
        """Return a request; None for other messages, which are handled or refused here."""
        try:
            message = pydantic_core.from_json(line)
        except ValueError as exc:
            self._send(to_json(unread(line, exc)) + b"\n")
            return None
        if isinstance(message, dict) and "method" not in message and "id" in message:
            if self._role is DoorRole.HOST:
                HOST.on_answer(message)
            return None
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            self._refuse(None, INVALID_REQUEST, "not a JSON-RPC request")
            return None
        if (self._role is None or self._role is DoorRole.AGENT) and not self._admit(message):
            return None
        if message["method"] == "notifications/cancelled":
            self._cancel(message.get("params") or {})
            return None
        if "id" not in message:
            return None
        params = message.get("params")
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and meta.get("aenv/call_id") is not None:
            self._keys[message["id"]] = key_of(message["method"], meta["aenv/call_id"])
        return message

    def _admit(self, message: dict[str, Any]) -> bool:
        """Learn the peer's role from its first message; return whether to run the message."""
        method = message["method"]
        try:
            if self._role is None:
                is_hello = method == HELLO
                self._role = role_of(message.get("params")) if is_hello else DoorRole.HOST
                if self._role is DoorRole.HOST:
                    HOST.attach(self)  # before the first call, which may send requests to the host
                if is_hello:
                    if "id" in message:
                        head = b'{"jsonrpc":"2.0","id":' + to_json(message["id"])
                        self._send(head + b',"result":{}}\n')
                    return False
            if "id" in message:
                check_method(self._role, method)
                if self._role is DoorRole.AGENT:
                    scope_meta(message.get("params"))
        except Fault as fault:
            answer = {"jsonrpc": "2.0", "id": message.get("id"), "error": fault.rpc_error()}
            self._send(to_json(answer) + b"\n")
            return False
        return True

    def _cancel(self, params: dict[str, Any]) -> None:
        request_id = params.get("requestId")
        key = self._keys.get(request_id)
        reason = str(params.get("reason") or "the caller cancelled")
        if key is not None and not self._dispatcher.cancel(key, reason):
            self._cancelled.add(request_id)  # it was read, but has not begun

    # --- running and answering ----------------------------------------------------------------

    def _handle(self, message: dict[str, Any], kind: str, *, waits: bool = False) -> None:
        """Run a request in this thread, or add it to the backlog if it `waits`."""
        request_id = message["id"]
        params = message.get("params") or {}
        if not isinstance(params, dict):
            self._refuse(request_id, INVALID_REQUEST, "params is not an object")
            return
        meta = params.get("_meta") or {}
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            self._keys.pop(request_id, None)
            self._refuse(request_id, SERVER_ERROR, "the call was cancelled before it began")
            return
        prefix = b'{"jsonrpc":"2.0","id":' + to_json(request_id) + b","
        # A call that waits may end while no leader is there to send the outbox.
        me = 0 if waits else threading.get_ident()

        def on_outcome(outcome: bytes) -> None:
            self._keys.pop(request_id, None)
            self._cancelled.discard(request_id)
            line = prefix + outcome + b"}\n"
            with self._lock:
                inline = threading.get_ident() == me == self._leader
                if inline:
                    # Sent together with the answers to what was read with it.
                    self._outbox.append(line)
                    self._outbox_bytes += len(line)
            if not inline:
                self._send(line)

        method, token = message["method"], meta.get("progressToken")
        progress = None if token is None else self._progress_sender(token)
        caller: LinkedCaller | None = None
        answered: Callable[[bytes], None] = on_outcome
        if token is not None and isinstance(offers := meta.get(OFFERS), list):
            send_note = self._note_sender(token)
            caller = LinkedCaller(send_note, offers)
            answered = _listening(send_note, meta.get(SESSION), on_outcome)
        if waits:
            run = self._dispatcher.accept(method, params, answered, progress, caller)
            if run is not None:
                with self._changed:
                    self._backlog.append(run)
                    self._changed.notify()  # a thread may have become free meanwhile
            return
        started = time.perf_counter()
        self._dispatcher.submit(method, params, answered, progress, caller)
        self._is_quick[kind] = time.perf_counter() - started < QUICK_S

    def _note_sender(self, token: Any) -> Callable[[Note], None]:
        def send_note(note: Note) -> None:
            params = {"progressToken": token, "note": note}
            line = to_json({"jsonrpc": "2.0", "method": NOTE, "params": params})
            self.send(line + b"\n")

        return send_note

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

    def _flush_outbox(self) -> None:
        if not self._outbox_bytes:
            return
        with self._lock:
            lines, self._outbox, self._outbox_bytes = self._outbox, [], 0
        self._send(b"".join(lines))

    def _send(self, data: bytes) -> None:
        """Send; when the peer is gone nothing is lost: it repeats its calls with their ids."""
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            self._closed = True


def _kind(message: dict[str, Any]) -> str:
    """Return the kind of a request, which predicts how long it takes: method and function."""
    params = message.get("params")
    name = params.get("name") if isinstance(params, dict) else None
    return f"{message['method']} {name}"


def _listening(
    send_note: Callable[[Note], None], session: Any, on_outcome: Callable[[bytes], None]
) -> Callable[[bytes], None]:
    """Tell a session of updated resources while its call runs; return what ends that."""
    if not isinstance(session, str) or not session:
        return on_outcome
    stop = SUBSCRIPTIONS.listen(session, lambda uri: send_note(update_note(uri)))

    def answered(outcome: bytes) -> None:
        stop()
        on_outcome(outcome)

    return answered


class _LeaderMonitor:
    """Checks the leaders of all connections of this process, and replaces those that are stuck.

    Its thread sleeps while leaders only read, so idle connections cost nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle_checks: dict[Connection, int] = {}
        """The connections whose leaders are checked."""
        self._has_thread = False

    def watch(self, connection: Connection) -> None:
        """Check a leader from now on; called by that leader, when it is not watched."""
        with self._changed:
            connection.is_watched = True
            self._idle_checks[connection] = 0
            if self._has_thread:
                self._changed.notify()
                return
            self._has_thread = True
        try:
            start_thread(self._run)
        except RuntimeError:  # the sandbox's limits allow no thread now; the next call retries
            self._forget_all()

    def _run(self) -> None:
        try:
            while True:
                time.sleep(MONITOR_S)
                with contextlib.suppress(MemoryError):  # a tool has used it up; check again
                    self._check_all()
        finally:
            self._forget_all()  # the next call of a connection starts another thread

    def _check_all(self) -> None:
        with self._changed:
            while not self._idle_checks:
                self._changed.wait()
            watched = list(self._idle_checks)
        for connection in watched:
            self._check(connection)

    def _check(self, connection: Connection) -> None:
        if connection.is_closed:
            self._forget(connection)
            return
        since = connection.inline_since
        if since is not None:
            self._idle_checks[connection] = 0
            if time.monotonic() - since > MONITOR_S:
                connection.replace_leader(since)
            return
        self._idle_checks[connection] += 1
        if self._idle_checks[connection] > _IDLE_CHECKS:
            self._forget(connection)
            if connection.inline_since is not None:  # it may not have seen that it is not watched
                self.watch(connection)

    def _forget(self, connection: Connection) -> None:
        with self._changed:
            connection.is_watched = False
            self._idle_checks.pop(connection, None)

    def _forget_all(self) -> None:
        with self._changed:
            self._has_thread = False
            for connection in self._idle_checks:
                connection.is_watched = False
            self._idle_checks.clear()


_monitor = _LeaderMonitor()


def _renew_monitor() -> None:
    global _monitor
    _monitor = _LeaderMonitor()


os.register_at_fork(after_in_child=_renew_monitor)


def serve(accept: Callable[[], socket.socket], dispatcher: Dispatcher) -> None:
    """Serve the connections that `accept` returns, until its listener is closed."""
    limit_stacks()
    while True:
        try:
            sock = accept()
        except OSError as exc:
            if exc.errno not in _TEMPORARY_ERRORS:
                return
            time.sleep(_ACCEPT_RETRY_S)  # a tool may have opened as many files as it may
            continue
        Connection(sock, dispatcher).start()
