"""A host's connection to the node's launcher, which it starts if needed."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray import daemon, logs
from aenv_ray.engines.base import EndCause
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable, inside_cause

logger = logging.getLogger(__name__)

START_DEADLINE_S: Final = 20.0
ANSWER_DEADLINE_S: Final = 60.0
"""A launcher answers at once and ends processes with SIGKILL; a busy node may delay both."""
TEMPLATE_DEADLINE_S: Final = 420.0
"""The launcher gives up on a template after 180 s, and may try once more without namespaces."""
BOOT_DEADLINE_S: Final = 120.0
"""The launcher gives up on an instance after 60 s. Restarts with each answer of a batch."""
_RETRY_S: Final = 0.005
_RESPAWN_S: Final = 2.0


class LauncherClient:
    """A connection to the launcher of one directory; starts the launcher if none runs.

    Args:
        directory: The result of `node_directory`.
        host_id: The host that owns the instances.
        owner_pid: The raylet; the launcher and its instances end with it.
        on_exit: Called with ``(instance id, cause, end of its log)``.
        on_lost: Called when the launcher itself is gone.
    """

    def __init__(
        self,
        directory: Path,
        host_id: str,
        owner_pid: int,
        on_exit: Callable[[str, EndCause, str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.host_id = host_id
        self._owner_pid = owner_pid
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._seq = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listener_pid = 0
        self._reader_task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, starting the launcher if needed; does nothing when connected.

        Raises:
            FabricUnavailable: The launcher did not start.
            DeadlineExceeded: The launcher runs and does not answer.
        """
        async with self._connecting:
            if self._writer is not None:
                return
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    while not await self._greet():
                        pass
            except DeadlineExceeded:
                raise  # it runs and does not answer
            except TimeoutError:
                log = self.directory / "launcher.log"
                output = log.read_text(errors="replace")[-1000:] if log.exists() else ""
                raise FabricUnavailable(
                    f"the node's launcher did not start within {START_DEADLINE_S:g} s: {output}",
                    hint=f"see {log}",
                ) from None

    async def _greet(self) -> bool:
        """Connect and identify this host; False if the launcher exited meanwhile."""
        reader, self._writer = await self._open()
        self._listener_pid = _listener_pid(self._writer.get_extra_info("socket"))
        self._reader_task = asyncio.create_task(self._read(reader))
        try:
            await self.ask("hello", host=self.host_id, owner_pid=self._owner_pid)
        except FabricUnavailable:
            # A killed launcher accepts connections until the kernel has closed its socket.
            await asyncio.sleep(_RETRY_S)
            return False
        except BaseException:
            await (
                self.close()
            )  # it does not know this host and would own later instances for nobody
            raise
        return True

    def is_listener_of(self, sock: socket.socket) -> bool:
        """Return whether this launcher created the listener to which a socket is connected.

        It creates those of all instances and hands them over. A process that puts another socket in
        the place of an instance's has another pid.
        """
        return _listener_pid(sock) == self._listener_pid

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = str(self.directory / "launcher.sock")
        spawn_at = 0.0
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=64 * 1024 * 1024)
            except (FileNotFoundError, ConnectionRefusedError):
                # Repeat: the first one may have exited because its predecessor still held the lock.
                if asyncio.get_running_loop().time() >= spawn_at:
                    spawn_at = asyncio.get_running_loop().time() + _RESPAWN_S
                    await daemon.start(
                        "aenv_ray.engines.process.launcher", str(self.directory),
                        env=daemon.environment(),
                    )  # fmt: skip
                await asyncio.sleep(_RETRY_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await _next_message(reader)) is not None:
            if message.get("event") == "exited":
                try:
                    self._on_exit(message["id"], end_cause(message), message["log"])
                except Exception:  # it concerns this instance; the connection serves all
                    extra = logs.of_instance(message["id"])
                    logger.exception("the end of %s could not be noted", message["id"], extra=extra)
                continue
            queue = self._answers.get(message["seq"])
            if queue is not None:
                queue.put_nowait(message)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        gone = {"gone": True}
        for queue in self._answers.values():
            queue.put_nowait(gone)
        self._on_lost()

    async def ask(
        self, op: str, *, deadline_s: float = ANSWER_DEADLINE_S, **fields: Any
    ) -> dict[str, Any]:
        """Send one request and return its answer.

        Args:
            op: One that `aenv_ray.engines.process.launcher` lists.
            deadline_s: How long to wait for the answer.
            fields: Further fields of the request.

        Raises:
            FabricUnavailable: The launcher is gone.
            DeadlineExceeded: There was no answer in time; the launcher may still act on it.
        """
        seq, queue = self.send(op, **fields)
        try:
            return await self.receive(queue, f"its answer to {op!r}", deadline_s)
        finally:
            self.forget(seq)

    def send(self, op: str, **fields: Any) -> tuple[int, asyncio.Queue[dict[str, Any]]]:
        """Send a request that gets several answers; `forget` it after the last.

        Raises:
            FabricUnavailable: The launcher is gone.
        """
        # Closing: it has ended, and `_read` is about to hear of it. uvloop refuses to write then.
        if self._writer is None or self._writer.is_closing():
            raise _launcher_ended()
        seq = next(self._seq)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers[seq] = queue
        message = {"op": op, "seq": seq, **fields}
        self._writer.write(json.dumps(message).encode() + b"\n")
        return seq, queue

    async def receive(
        self, queue: asyncio.Queue[dict[str, Any]], what: str, deadline_s: float
    ) -> dict[str, Any]:
        """Return the next answer.

        Args:
            queue: The result of `send`.
            what: Names the answer in the error.
            deadline_s: How long to wait for this answer.

        Raises:
            FabricUnavailable: The launcher is gone.
            DeadlineExceeded: There was no answer in time.
        """
        try:
            answer = queue.get_nowait()  # in a batch, most answers have arrived already
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await queue.get()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"waited {deadline_s:g} s for the node's launcher and {what}",
                    hint=f"the node may be overloaded; see {self.directory}/launcher.log",
                ) from None
        if answer.get("gone"):
            raise _launcher_ended()
        return answer

    def forget(self, seq: int) -> None:
        """Drop a request made with `send`."""
        self._answers.pop(seq, None)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the launcher."""
        return self._writer is not None

    async def close(self) -> None:
        """Disconnect; instances run on until their deadline or the adoption grace."""
        if self._reader_task is not None:
            self._reader_task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def _next_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None once the connection is closed or broken."""
    try:
        line = await reader.readline()
        message: dict[str, Any] | None = json.loads(line) if line else None
    except (OSError, ValueError):
        return None
    return message


def end_cause(report: Mapping[str, Any]) -> EndCause:
    """Return the cause that the launcher reports."""
    return EndCause(report["cause"], inside_cause(report["inside"]))


def _listener_pid(sock: socket.socket) -> int:
    """Return the pid that called ``listen`` at the other end; 0 where the kernel does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _launcher_ended() -> FabricUnavailable:
    return FabricUnavailable(
        "the process that starts this node's sandboxes (its launcher) has ended",
        hint="create again, which starts another one; if it ends again, `dmesg` on the node says "
        "whether the kernel killed it for lack of memory",
    )
