"""The client side of the fast door (`aenv_ray.runtime.door.door`): one connection to a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pydantic_core

from aenv_ray import errors
from aenv_ray.engines.base import (
    MAX_REQUEST_VALUES,
    EndCause,
    OnProgress,
    Sandbox,
    lost,
    read_json,
)
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation
from aenv_ray.runtime.door.caller_link import LOG, NOTE
from aenv_ray.runtime.door.host.link import (
    END_PROCESSES_METHOD,
    ENVIRONMENT_METHOD,
    SIDECAR_METHOD,
)
from aenv_ray.runtime.door.roles import HELLO, DoorRole

CAUSE_WAIT_S: Final = 2.0
"""How long to wait for the cause of a broken connection; a launcher reports it in milliseconds."""
SIDECAR_METHODS: Final = frozenset(
    {"aenv/exec", "aenv/read_file", "aenv/write_file", END_PROCESSES_METHOD}
)
"""What the runtime may request of its sidecar container."""
_SIDECAR_GRACE_S: Final = 5.0
_MAX_SIDECAR_S: Final = 86_400.0
_WATCH_S: Final = 0.5
"""How often overdue calls are looked for."""
_BUSY_CALLS: Final = 16
"""From this many pending calls on, a request waits `_BUSY_DELAY_S` to be sent with others."""
_BUSY_DELAY_S: Final = 0.001
_BATCH_DELAY_S: Final = 0.002
"""How long a request with `may_wait` waits to be sent with others. A request that is sent alone
wakes the sandbox and later the host: a tenth of a call's cost on two cores. About four calls arrive
in a millisecond."""
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
"""A sandbox that sends a longer message is ended, because it takes its host's memory."""
MAX_HELD_SHARE: Final = 1 / 8
"""Share of the node's memory that one process may hold of what sandboxes have sent: incomplete
messages, and requests without an answer. Beyond it, the sandbox of which it holds most is ended:
many sandboxes together must not fill the node's memory."""
_LEAST_HELD_BYTES: Final = 512 * 1024 * 1024
_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_LITTLE_BYTES: Final = 1024 * 1024
"""Up to this much of one sandbox is not counted."""
_MAX_ID_CHARACTERS: Final = 100
MAX_REPORT_BYTES: Final = 1024 * 1024
"""A longer progress report or note is replaced by a remark: up to a thousand are held for a slow
caller."""
MAX_REQUESTS: Final = 1024
"""Requests of one runtime that are answered at the same time; further ones are refused."""
MAX_UNREAD_BYTES: Final = 64 * 1024 * 1024
"""How much a host holds of what a sandbox has not read, beside one message of any size: calls wait
to be sent, and a sandbox that requests something then is ended."""
STALLED_S: Final = 10.0
"""Calls that wait are refused when the sandbox has read nothing for so long."""
_READ_BYTES: Final = 65_536
"""Below the size from which malloc asks the kernel for each buffer."""
_LAST_ERROR_CHARACTERS: Final = 500
_ANSWER: Final = b'{"jsonrpc":"2.0","id":'
_HELLO: Final = b'{"jsonrpc":"2.0",%%b"method":"%s","params":{"role":"%%b"}}\n' % HELLO.encode()
_HELLO_S: Final = 10.0
_HELLO_BYTES: Final = 4096
FULL_S: Final = 5.0
"""How long to retry while as many connections wait for a runtime as its listener holds."""
_FULL_PAUSE_S: Final = 0.01
_LONGEST_FULL_PAUSE_S: Final = 0.2

CHAT_METHOD: Final = "aenv/chat"
_REFUSALS: Final = {
    CHAT_METHOD: (
        "this environment may not ask a chat model",
        "set deployConfig.chatModel in its config.json; where a gateway runs, the operator also "
        "names it in AENV_ALLOW_CHAT_MODELS",
    ),
    ENVIRONMENT_METHOD: (
        "this environment may not call other environments",
        "name them in deployConfig.environments in its config.json",
    ),
}
"""Message and hint for services that a sandbox does not have."""
Dial = Callable[[], Awaitable[socket.socket]]


def _progress(params: dict[str, Any], size: int) -> tuple[float | None, float | None, str | None]:
    """Return a progress report.

    Raises:
        TypeError: It is not one.
    """
    match params:
        case {"progress": int() | float() as progress}:
            total, text = params.get("total"), params.get("message")
            if isinstance(total, int | float | None) and isinstance(text, str | None):
                return progress, total, text if size <= MAX_REPORT_BYTES else _left_out(size)
    raise TypeError("not a progress report")


def _note(params: dict[str, Any], size: int) -> tuple[float | None, float | None, str | None]:
    """Return a note of `aenv_ray.runtime.door.caller_link` as a report.

    Raises:
        TypeError: It is not one.
    """
    match params.get("note"):
        case {"method": str(), "params": {"data": data}} if not isinstance(data, dict):
            raise TypeError("not a note: its data is not an object")
        case {"method": str(), **rest} as note if isinstance(rest.get("params", {}), dict):
            if size > MAX_REPORT_BYTES:
                data = {"msg": _left_out(size), "extra": None}
                note = {"method": LOG, "params": {"level": "warning", "data": data}}
            return None, None, pydantic_core.to_json(note).decode()
    raise TypeError("not a note")


def _left_out(size: int) -> str:
    return f"[a message of {size} bytes was left out; the limit is {MAX_REPORT_BYTES}]"


async def connect_to_door(path: Path) -> socket.socket:
    """Return a non-blocking connection to the Unix socket of a door.

    A blocking socket would keep the whole process waiting while as many connections wait to be
    accepted as the listener holds: code in the sandbox can keep its runtime from accepting any.

    Raises:
        BlockingIOError: That is the case, and remained so for `FULL_S`.
        OSError: Nothing listens there.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + FULL_S
    pause_s = _FULL_PAUSE_S
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        while True:
            try:
                # `loop.sock_connect` would take a refused socket for a connected one.
                sock.connect(str(path))
            except BlockingIOError:
                if loop.time() + pause_s > end:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_FULL_PAUSE_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def not_connected(instance_id: InstanceId, exc: OSError) -> errors.AenvError:
    """Return the error for a sandbox to whose door no connection could be made."""
    if isinstance(exc, BlockingIOError | TimeoutError):  # it may be running
        return errors.FabricUnavailable(
            f"{instance_id} accepts no connection now ({exc.strerror or exc})",
            hint="code in it may keep its runtime from answering; try again, or release it",
        )
    return lost(instance_id, f"it does not answer ({exc.strerror or exc})")


class _HeldMessages:
    """How much this process holds of what its sandboxes have sent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[DoorSandbox, int] = {}
        self._total = 0
        self.limit_bytes = _LEAST_HELD_BYTES
        with contextlib.suppress(ValueError, OSError):  # unknown on this system
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            with contextlib.suppress(ValueError, OSError):  # no container with a limit
                memory = min(memory, int(_CONTAINER_LIMIT.read_bytes()))
            self.limit_bytes = max(self.limit_bytes, int(memory * MAX_HELD_SHARE))

    def note(self, sandbox: DoorSandbox, size: int) -> DoorSandbox | None:
        """Note how much is held of a sandbox.

        Returns:
            The sandbox of which most is held, if that is too much together. It is forgotten.
        """
        with self._lock:
            self._forget(sandbox)
            if not size:
                return None
            self._sizes[sandbox] = size
            self._total += size
            if self._total <= self.limit_bytes:
                return None
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._forget(largest)
            return largest

    def _forget(self, sandbox: DoorSandbox) -> None:
        self._total -= self._sizes.pop(sandbox, 0)


HELD: Final = _HeldMessages()
"""The held messages of this process, for all its event loops."""


@dataclass(slots=True)
class _Waiting:
    """A call without an answer."""

    future: asyncio.Future[bytes]
    method: str
    deadline: float
    """A time of the loop's clock."""
    on_progress: OnProgress | None
    token: str = ""


class DoorSandbox(Sandbox):
    """A sandbox whose runtime answers on a stream socket.

    It reads and writes the socket itself: a single call is written at once and its answer parsed
    where it is read, several turns of the event loop earlier than with an asyncio transport.

    Args:
        instance_id: The id of the sandbox.
        isolation: What separates the sandbox from the node.
        start_mode: As for `Sandbox`.
        find_cause: Waits for the cause of a broken connection.
        cause_wait_s: How long `find_cause` may take.
        dial: Returns a new connection to the runtime that the engine started; raises OSError. The
            host's own connection and those of `open_door` are made by it.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        isolation: Isolation,
        start_mode: str,
        find_cause: Callable[[], Awaitable[EndCause]],
        cause_wait_s: float = CAUSE_WAIT_S,
        dial: Dial | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.isolation = isolation
        self.start_mode = start_mode
        self._find_cause = find_cause
        self._cause_wait_s = cause_wait_s
        self._dial = dial
        self._ids = itertools.count(1)
        self._pending: dict[int, _Waiting] = {}
        self._outbox: list[bytes] = []
        self._is_watching = False
        self._buffer = bytearray()
        self._scanned = 0
        self._is_counted = False
        """Whether `HELD` counts something of this sandbox."""
        self._request_bytes = 0
        """Size of its requests that are being answered."""
        self._sock: socket.socket | None = None
        self._unsent = bytearray()
        self._longest_unsent = 0
        """Size of the longest message that is at least partly in `_unsent`, or was since it was
        last empty."""
        self._has_read = asyncio.Event()
        """Set, and replaced, when the sandbox has read something of `_unsent`."""
        self._loop = asyncio.get_running_loop()
        self._cause: EndCause | None = None
        self._on_end: list[Callable[[EndCause], None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._closed = False
        self._last_error = ""
        self.sidecar: Sandbox | None = None
        """The second container, of which the runtime may make requests; None without one."""
        self._requests: dict[str, asyncio.Task[None]] = {}
        """Requests of the runtime that are being answered, by id."""

    async def open(self) -> None:
        """Connect as the host.

        Raises:
            OSError: The sandbox does not answer.
        """
        assert self._dial is not None
        self.connect(await self._dial())
        self._send(_HELLO % (b"", DoorRole.HOST.encode()))

    def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket, with whatever role it has."""
        sock.setblocking(False)
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self._on_readable)

    # --- the socket ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._on_broken(exc)
            return
        if not data:
            self._on_broken(None)
            return
        buffer = self._buffer
        buffer += data
        while True:
            end = buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(buffer)
                if len(buffer) > MAX_MESSAGE_BYTES:
                    self._refuse(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
                elif len(buffer) > _LITTLE_BYTES:
                    self._note_held(len(buffer))
                return
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._scanned = 0
            if self._is_counted:
                self._note_held(0)
            try:
                self._on_line(line)
            except (ValueError, KeyError, AttributeError, TypeError):
                self._refuse(f"it sent an invalid message: {line[:100]!r}")
                return

    def _note_held(self, partial_bytes: int) -> None:
        size = partial_bytes + self._request_bytes
        self._is_counted = size > _LITTLE_BYTES
        largest = HELD.note(self, size if self._is_counted else 0)
        if largest is not None:
            # In its own loop: a process may have several.
            largest._loop.call_soon_threadsafe(
                largest._refuse, "it sent most of the messages that fill its host's memory"
            )

    def _refuse(self, why: str) -> None:
        self.end(EndCause(why, errors.InsideCause.CONNECTION))

    def _on_broken(self, exc: OSError | None) -> None:
        self._hang_up()
        if not self._closed and self._cause is None:
            self._ending = self._loop.create_task(self._learn_cause(exc))

    def _send(self, data: bytes) -> None:
        if self._sock is None:
            return  # pending calls fail with the cause of the end
        if self._unsent:
            self._unsent += data
            self._longest_unsent = max(self._longest_unsent, len(data))
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # reading reports the end and its cause
        if sent < len(data):
            self._unsent += data[sent:]
            self._longest_unsent = len(data)
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._sock is None:
            return
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        self._note_read()
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _note_read(self) -> None:
        self._has_read.set()
        self._has_read = asyncio.Event()

    async def _wait_until_read(self, method: str, size: int, deadline: float) -> None:
        """Wait until a call of a size may be sent; `deadline` is a time of the loop's clock.

        Raises:
            CallOutcomeUnknown: The sandbox does not read, and nothing was sent. It is the error of
                a sandbox that does not answer, since an agent can cause both and gain nothing.
        """
        while self._unsent and len(self._unsent) + size > MAX_UNREAD_BYTES:
            try:
                async with asyncio.timeout_at(min(deadline, self._loop.time() + STALLED_S)):
                    await self._has_read.wait()
            except TimeoutError:
                raise errors.CallOutcomeUnknown(
                    f"{method} was not sent: {self.instance_id} has not read {len(self._unsent):,} "
                    f"bytes that it was sent before; the limit is {MAX_UNREAD_BYTES:,}",
                    instance_id=self.instance_id,
                    hint="code in it may keep its runtime from reading; try again, or release it",
                ) from None

    def _hang_up(self) -> None:
        for task in list(self._requests.values()):
            task.cancel()
        sock, self._sock = self._sock, None
        if self._is_counted:
            self._is_counted = False
            HELD.note(self, 0)
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._note_read()
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()

    def _on_line(self, line: bytes) -> None:
        # The result is passed on as JSON, without decoding it.
        if line.startswith(_ANSWER):
            id_end = line.index(b",", len(_ANSWER))
            request_id = int(line[len(_ANSWER) : id_end])
            waiting = self._pending.pop(request_id, None)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(line[id_end + 1 : -1])
            return
        message = read_json(line, MAX_REQUEST_VALUES)
        if message.get("id", 0) is None:  # an error of no request: why it closes the connection
            self._last_error = str(message["error"]["message"])[:_LAST_ERROR_CHARACTERS]
            return
        params = message.get("params") or {}
        if not isinstance(params, dict):
            raise TypeError("params is not an object")
        if message.get("method") == "notifications/cancelled":
            cancelled = self._requests.get(str(params.get("requestId")))
            if cancelled is not None:
                cancelled.cancel()
            return
        if "id" in message:
            self._on_request(str(message["id"]), message, len(line))
            return
        for waiting in self._pending.values():
            if waiting.on_progress is not None and waiting.token == params.get("progressToken"):
                is_note = message.get("method") == NOTE
                waiting.on_progress(*(_note if is_note else _progress)(params, len(line)))

    def _on_request(self, key: str, message: dict[str, Any], size: int) -> None:
        if len(key) > _MAX_ID_CHARACTERS:
            raise TypeError("the id of a request is too long")
        if len(self._unsent) > MAX_UNREAD_BYTES + self._longest_unsent:
            self._refuse("it makes requests and does not read what it is sent")
            return
        excess = None
        if len(self._requests) >= MAX_REQUESTS or key in self._requests:
            excess = (
                f"{len(self._requests)} requests under way, and may have {MAX_REQUESTS}, each with "
                "an id of its own"
            )
        elif self._request_bytes + size > MAX_MESSAGE_BYTES:
            excess = (
                f"requests of {self._request_bytes} bytes under way, and may have "
                f"{MAX_MESSAGE_BYTES}"
            )
        if excess is not None:
            refusal = errors.PolicyRefused(
                f"{self.instance_id} has {excess}", hint="wait for the answers to earlier requests"
            )
            self._send_error(key, refusal)
            return
        request = self._loop.create_task(self._answer(key, message))
        self._requests[key] = request
        self._request_bytes += size
        self._note_held(0)

        def end(_: object) -> None:
            del self._requests[key]
            self._request_bytes -= size
            if self._is_counted:
                self._note_held(0)

        request.add_done_callback(end)

    async def _learn_cause(self, exc: OSError | None) -> None:
        try:
            async with asyncio.timeout(self._cause_wait_s):
                cause = await self._find_cause()
        except TimeoutError:
            # The runtime says before it closes a connection that a limit keeps it from serving it.
            inside = errors.InsideCause.PROCESSES if self._last_error else None
            words = f"the connection to it broke ({self._last_error or exc or 'closed'})"
            cause = EndCause(words, inside)
        self.end(cause)

    # --- requests of the runtime to its host and its sidecar ------------------------------------

    async def _answer(self, request_id: str, message: dict[str, Any]) -> None:
        try:
            method, params = message.get("method"), message.get("params") or {}
            service = self.services.get(str(method))
            result = await (service(params) if service else self._ask_sidecar(method, params))
        except errors.AenvError as exc:
            self._send_error(request_id, exc)
            return
        head = b'{"jsonrpc":"2.0","id":' + pydantic_core.to_json(request_id)
        self._send(head + b',"result":' + result + b"}\n")

    def _send_error(self, request_id: str, refusal: errors.AenvError) -> None:
        head = b'{"jsonrpc":"2.0","id":' + pydantic_core.to_json(request_id)
        error = {"code": -32000, "message": refusal.message, "data": errors.to_wire(refusal)}
        self._send(head + b',"error":' + pydantic_core.to_json(error) + b"}\n")

    async def _ask_sidecar(self, method: Any, params: dict[str, Any]) -> bytes:
        if method in _REFUSALS:
            message, hint = _REFUSALS[method]
            raise errors.ConfigError(message, hint=hint)
        wanted, inner = str(params.get("method") or ""), params.get("params")
        is_known = method == SIDECAR_METHOD and wanted in SIDECAR_METHODS
        if not is_known or not isinstance(inner, dict):
            raise errors.ConfigError(
                f"a runtime cannot request {wanted or method!r} of its host",
                hint="the runtime in its image may be newer than this host: update aenv-ray here",
            )
        if self.sidecar is None:
            raise errors.ConfigError(
                "the instance has no second container",
                hint='set deployConfig.podTemplate to "DualContainer" and use the docker or the '
                "kubernetes engine",
            )
        timeout_s = (inner.get("_meta") or {}).get("aenv/timeout_s")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_SIDECAR_S:
            raise errors.ConfigError(
                f"invalid timeout {timeout_s!r}: expected a number of seconds above 0, at most "
                f"{_MAX_SIDECAR_S:g}",
                hint="leave the timeout out for the default",
            )
        return await self.sidecar.request_json(
            wanted, pydantic_core.to_json(inner), deadline_s=timeout_s + _SIDECAR_GRACE_S
        )

    # --- Sandbox ------------------------------------------------------------------------------

    def end(self, cause: EndCause) -> None:
        """Record that the sandbox ended and fail its pending calls; only the first cause counts."""
        if self._cause is not None:
            return
        self._cause = cause
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            if not waiting.future.done():
                waiting.future.set_exception(lost(self.instance_id, cause))
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(cause)
        self._hang_up()

    @property
    def end_cause(self) -> EndCause | None:  # noqa: D102
        return self._cause

    def on_end(self, callback: Callable[[EndCause], None]) -> None:  # noqa: D102
        if self._cause is not None:
            callback(self._cause)
        else:
            self._on_end.append(callback)

    async def request_json(  # noqa: D102
        self,
        method: str,
        params: bytes,
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        may_wait: bool = False,
    ) -> bytes:
        deadline = self._loop.time() + deadline_s
        if self._unsent:
            await self._wait_until_read(method, len(params), deadline)
        if self._cause is not None:
            raise lost(self.instance_id, self._cause)
        request_id = next(self._ids)
        future: asyncio.Future[bytes] = self._loop.create_future()
        waiting = _Waiting(future, method, deadline, on_progress)
        if on_progress is not None:
            # Tokens are unique on the connection; two callers may have chosen the same one.
            waiting.token = f"p{request_id}"
            data = _readable(params)
            data["_meta"] = {**data.get("_meta", {}), "progressToken": waiting.token}
            params = pydantic_core.to_json(data)
        self._pending[request_id] = waiting
        if not self._is_watching:
            self._is_watching = True
            self._loop.call_later(_WATCH_S, self._watch)
        self._write(
            b'{"jsonrpc":"2.0","id":%d,"method":"%s","params":%s}\n'
            % (request_id, method.encode(), params),
            may_wait=may_wait,
        )
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._pending.pop(request_id, None)
            self._cancel(request_id)
            raise
        if outcome.startswith(b'"result":'):
            return outcome[len(b'"result":') :]
        try:
            error = read_json(b"{" + outcome + b"}", MAX_REQUEST_VALUES)["error"]
            data = error.get("data") or {"code": "internal_error", "message": error.get("message")}
            raise errors.reported_by_sandbox(data, method, instance_id=self.instance_id)
        except (ValueError, KeyError, AttributeError, TypeError):
            words = f"it answered {method} with an invalid error: {outcome[:100]!r}"
            cause = EndCause(words, errors.InsideCause.CONNECTION)
            self.end(cause)
            raise lost(self.instance_id, cause) from None

    async def open_door(self, role: DoorRole) -> socket.socket:  # noqa: D102
        if self._dial is None or self._cause is not None:
            return await super().open_door(role)
        sock = await self._dial()
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_HELLO_S):
                await self._loop.sock_sendall(sock, _HELLO % (b'"id":0,', role.encode()))
                answer = bytearray()
                while not answer.endswith(b"\n") and len(answer) < _HELLO_BYTES:
                    if not (data := await self._loop.sock_recv(sock, _HELLO_BYTES)):
                        break
                    answer += data
            if not answer.startswith(_ANSWER + b'0,"result"'):
                # Without roles, the connection would be one of a host.
                raise ConnectionRefusedError(f"its runtime knows no roles: {bytes(answer[:100])!r}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _cancel(self, request_id: int) -> None:
        """Tell the sandbox that a call was cancelled (invariant 11)."""
        self._write(
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}\n'
            % request_id
        )

    def _watch(self) -> None:
        """Fail overdue calls; runs only while calls are pending."""
        now = self._loop.time()
        for request_id, waiting in list(self._pending.items()):
            if waiting.deadline <= now:
                del self._pending[request_id]
                if not waiting.future.done():
                    waiting.future.set_exception(self._overdue(waiting.method))
        self._is_watching = bool(self._pending)
        if self._is_watching:
            self._loop.call_later(_WATCH_S, self._watch)

    def _overdue(self, method: str) -> errors.CallOutcomeUnknown:
        return errors.CallOutcomeUnknown(
            f"the sandbox of {self.instance_id} did not answer {method} in time",
            instance_id=self.instance_id,
            hint="it may be stuck; release it and create another",
        )

    def _disconnected(self, method: str) -> errors.CallOutcomeUnknown:
        return errors.CallOutcomeUnknown(
            f"the connection to {self.instance_id} was closed before {method} had an answer",
            instance_id=self.instance_id,
            hint="the call continues; repeat it with the same call id to get its outcome",
        )

    def _write(self, line: bytes, *, may_wait: bool = False) -> None:
        """Send at once, or after a short delay with what follows: if it may wait, or in a burst."""
        if (may_wait or len(self._pending) >= _BUSY_CALLS) and len(line) < _LITTLE_BYTES:
            if not self._outbox:
                delay_s = _BATCH_DELAY_S if may_wait else _BUSY_DELAY_S
                self._loop.call_later(delay_s, self._flush)
            self._outbox.append(line)
        elif self._outbox:
            self._outbox.append(line)
            self._flush()  # lines stay in order
        else:
            self._send(line)

    def _flush(self) -> None:
        if self._outbox:
            lines, self._outbox = self._outbox, []
            self._send(b"".join(lines))

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            if not waiting.future.done():
                waiting.future.set_exception(self._disconnected(waiting.method))
        self._hang_up()
        if self._ending is not None:
            self._ending.cancel()


def _readable(params: bytes) -> dict[str, Any]:
    """Decode a call's parameters.

    Raises:
        ToolInputInvalid: They exceed the limits of the JSON parser.
    """
    try:
        data: dict[str, Any] = pydantic_core.from_json(params)
    except ValueError as exc:
        raise errors.ToolInputInvalid(
            f"the arguments cannot be read: {exc}",
            hint="nest them less deeply, and write long numbers as text",
        ) from None
    return data
