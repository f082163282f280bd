"""The host's side of the node's launcher: finds it, starts it, speaks with it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.node.directory import daemon_environment
from aenv_ray.errors import DeadlineExceeded, FabricUnavailable

START_DEADLINE_S: Final = 20.0
ANSWER_DEADLINE_S: Final = 60.0
"""A launcher decides at once and ends what it stops with SIGKILL; a node may be very busy."""
TEMPLATE_DEADLINE_S: Final = 420.0
"""The launcher gives up on a template after 180 s, and may try once more without namespaces."""
BOOT_DEADLINE_S: Final = 120.0
"""The launcher gives up on an instance after 60 s; counted anew for each answer of a batch."""
_RETRY_S: Final = 0.005
_RESPAWN_S: Final = 2.0


class LauncherClient:
    """A connection to the launcher of one directory; starts the launcher when there is none.

    Args:
        directory: From `node_directory`.
        host_id: Whose instances these are.
        owner_pid: Process with which the launcher and everything in it ends; the raylet.
        on_exit: Told ``(instance id, cause, end of its log)``.
        on_lost: Told when the launcher itself is gone.
    """

    def __init__(
        self,
        directory: Path,
        host_id: str,
        owner_pid: int,
        on_exit: Callable[[str, str, str], None],
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
        self._reader_task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, starting the launcher if need be; does nothing when connected.

        Raises:
            FabricUnavailable: It did not come up.
            DeadlineExceeded: It is there and does not answer.
        """
        async with self._connecting:
            if self._writer is not None:
                return
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    while not await self._greet():
                        pass
            except DeadlineExceeded:
                raise  # it is there and does not answer
            except TimeoutError:
                log = self.directory / "launcher.log"
                words = log.read_text(errors="replace")[-1000:] if log.exists() else ""
                raise FabricUnavailable(
                    f"the node's launcher did not start within {START_DEADLINE_S:g} s: {words}",
                    hint=f"look into {log}",
                ) from None

    async def _greet(self) -> bool:
        """Connect and say who we are; False when the launcher went meanwhile."""
        reader, self._writer = await self._open()
        self._reader_task = asyncio.create_task(self._read(reader))
        try:
            await self.ask("hello", host=self.host_id, owner_pid=self._owner_pid)
        except FabricUnavailable:
            # One that was killed takes connections until the kernel is through with it.
            await asyncio.sleep(_RETRY_S)
            return False
        except BaseException:
            await self.close()  # it does not know us: what we asked for later would be nobody's
            raise
        return True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = str(self.directory / "launcher.sock")
        spawn_at = 0.0
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=64 * 1024 * 1024)
            except (FileNotFoundError, ConnectionRefusedError):
                # Again now and then: the first one may have met its predecessor on the way out.
                if asyncio.get_running_loop().time() >= spawn_at:
                    spawn_at = asyncio.get_running_loop().time() + _RESPAWN_S
                    await self._spawn()
                await asyncio.sleep(_RETRY_S)

    async def _spawn(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "aenv_ray.engines.process.launcher", str(self.directory),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            env=daemon_environment(), start_new_session=True,
        )  # fmt: skip
        await process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message.get("event") == "exited":
                    self._on_exit(message["id"], message["cause"], message["log"])
                    continue
                queue = self._answers.get(message["seq"])
                if queue is not None:
                    queue.put_nowait(message)
        except (OSError, ValueError):
            pass  # a broken connection ends like a closed one
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
            op: One of those that `aenv_ray.engines.process.launcher` knows.
            deadline_s: How long to wait for the answer.
            fields: Of the request.

        Raises:
            FabricUnavailable: The launcher is gone.
            DeadlineExceeded: There was no answer in time; the request may still be carried out.
        """
        seq, queue = self.send(op, **fields)
        try:
            return await self.receive(queue, f"its answer to {op!r}", deadline_s)
        finally:
            self.forget(seq)

    def send(self, op: str, **fields: Any) -> tuple[int, asyncio.Queue[dict[str, Any]]]:
        """Send a request that gets several answers; `forget` it when they are in.

        Raises:
            FabricUnavailable: The launcher is gone.
        """
        if self._writer is None:
            raise FabricUnavailable("the node's launcher is gone")
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
            queue: From `send`.
            what: What the launcher is to tell, for the error.
            deadline_s: How long to wait for this one.

        Raises:
            FabricUnavailable: The launcher is gone.
            DeadlineExceeded: It did not come in time.
        """
        try:
            answer = queue.get_nowait()  # of many that were asked for, most are there already
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(deadline_s):
                    answer = await queue.get()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"waited {deadline_s:g} s for the node's launcher and {what}",
                    hint=f"the node may be overloaded; look into {self.directory}/launcher.log",
                ) from None
        if answer.get("gone"):
            raise FabricUnavailable("the node's launcher died")
        return answer

    def forget(self, seq: int) -> None:
        """Drop a request made with `send`."""
        self._answers.pop(seq, None)

    @property
    def is_connected(self) -> bool:
        """Whether the launcher is there."""
        return self._writer is not None

    async def close(self) -> None:
        """Disconnect; instances run on until their deadline or the adoption grace."""
        if self._reader_task is not None:
            self._reader_task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
