"""One instance of the kubernetes engine, as its host sees it, and its connections.

On a connection, both sides first prove that they know the key; then the host tells its purpose.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.base import EndCause
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.node.container_reports import MAX_REPORT_BYTES, parse_report
from aenv_ray.engines.node.host_key import HostKey, authenticate
from aenv_ray.errors import AenvError, FabricUnavailable, inside_cause
from aenv_ray.ids import InstanceId

CONNECT_S: Final = 10.0
_RETRY_S: Final = 0.02
_LONGEST_RETRY_S: Final = 0.5
_PIECE_BYTES: Final = 65_536
_MAX_ANSWERS: Final = 64
"""One is outstanding at a time: a pod that sends more is no longer listened to."""
_IDLE_S: Final = 15
_UNANSWERED_MS: Final = 30_000
READERS_S: Final = 5.0
"""How long a pod that ended is kept for readers of its log."""


@dataclass
class PodInstance:
    """A pod of this host, and the connections to it."""

    id: InstanceId
    name: str
    nonce: str
    ended: asyncio.Future[EndCause]
    """The cause, once it has ended."""
    address: asyncio.Future[str]
    """Its address, once all its containers run."""
    failed: asyncio.Future[None]
    """The exception that prevents it from starting; never has a result."""
    uid: str = ""
    mounts: Mapping[str, list[str]] = field(default_factory=dict)
    """By container: where the pod's volumes are mounted, those of the cluster's webhooks included.
    """
    has_sidecar: bool = False
    has_storage: bool = False
    is_up: bool = False
    unscheduled_reason: str = ""
    """Why the scheduler finds no node for it; "" if it is scheduled."""
    node: str = ""
    sandbox: DoorSandbox | None = None
    sidecar: DoorSandbox | None = None
    controls: list[ControlConnection] = field(default_factory=list)
    readers: set[asyncio.Event] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    unexplained: EndCause | None = None
    """The cause of its end unless the API still shows a reason from outside."""
    decision: asyncio.TimerHandle | None = None
    """When `unexplained` becomes the cause."""

    @classmethod
    def new(cls, instance_id: InstanceId, name: str, nonce: str) -> PodInstance:
        """Return an instance that has not started."""
        loop = asyncio.get_running_loop()
        ended, address, failed = (loop.create_future() for _ in range(3))
        return cls(instance_id, name, nonce, ended, address, failed)

    def created(self, pod: Mapping[str, Any]) -> None:
        """Note what the API made of the pod's manifest."""
        self.uid = pod["metadata"]["uid"]
        self.mounts = {
            container["name"]: [mount["mountPath"] for mount in container["volumeMounts"]]
            for container in pod["spec"]["containers"]
            if "volumeMounts" in container
        }

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod is this instance's, not an earlier instance's of the same name."""
        annotations = pod["metadata"].get("annotations") or {}
        return bool(annotations.get(names.NONCE) == self.nonce)

    def update(self, pod: Mapping[str, Any], gone: bool) -> EndCause | None:
        """Update from the API's view of its pod; return the cause if the pod has ended.

        It is None, too, while the reason of its end is `unexplained`.
        """
        self.uid = pod["metadata"]["uid"]
        self.node = pod["spec"].get("nodeName") or ""
        self.unscheduled_reason = pod_status.unscheduled(pod) or ""
        if not self.is_up and not gone:
            failure = pod_status.start_failure(pod, self.id)
            if failure is not None:
                self._fail(failure)
                return None
        if gone or pod_status.is_over(pod):
            self.unexplained = pod_status.unexplained_end(pod) if self.is_up else None
            if self.unexplained is None:
                return pod_status.end_cause(pod)
            return self.unexplained if gone else None  # a pod that is gone gets no reason any more
        address = pod_status.address(pod)
        if address is not None and not self.address.done():
            self.address.set_result(address)
        return None

    def _fail(self, failure: AenvError | pod_status.UnsuitableImage) -> None:
        if not self.failed.done():
            self.failed.set_exception(failure)
            self.failed.exception()  # retrieved, in case nothing waits for it

    def end(self, cause: EndCause) -> None:
        """Record that it ended; the first cause counts."""
        if self.ended.done():
            return
        self.ended.set_result(cause)
        self._cancel_timers()
        for sandbox in (self.sandbox, self.sidecar):
            if sandbox is not None:
                sandbox.end(cause)

    def _cancel_timers(self) -> None:
        for timer in (self.timer, self.decision):
            if timer is not None:
                timer.cancel()

    async def take_control(self, key: HostKey, on_ended: Callable[[EndCause, str], None]) -> None:
        """Become its host, from the pod's point of view; `on_ended` gets cause and log.

        Raises:
            OSError: It does not answer.
        """

        def on_sidecar_ended(cause: EndCause, log: str) -> None:
            on_ended(pod_status.of_sidecar(cause), log)

        await self.release_control()
        if self.has_sidecar:
            sock = await self.connect(manifest.SIDECAR_PORT, key, {"kind": "control"})
            self.controls.append(ControlConnection(sock, on_sidecar_ended))
        sock = await self.connect(manifest.PORT, key, {"kind": "control"})
        self.controls.append(ControlConnection(sock, on_ended))

    async def connect(self, port: int, key: HostKey, purpose: Mapping[str, Any]) -> Any:
        """Return a connection to one of its containers, for a purpose.

        Raises:
            OSError: It does not answer.
        """
        secret = key.secret(self.name, self.nonce, str(port))
        return await open_authenticated(self.address.result(), port, secret, purpose)

    async def move_deadline(self, ends_in_s: float) -> None:
        """Set its deadline, in seconds from now.

        Raises:
            FabricUnavailable: It does not answer.
        """
        for control in self.controls:
            if not await control.move_deadline(ends_in_s) and not self.ended.done():
                raise FabricUnavailable(f"{self.id} does not answer: its deadline is unchanged")

    async def release_control(self) -> None:
        """Close the control connections."""
        controls, self.controls = self.controls, []
        for control in controls:
            await control.close()

    async def close(self) -> None:
        """Disconnect; the pod keeps running."""
        self._cancel_timers()
        await self.release_control()
        for sandbox in (self.sandbox, self.sidecar):
            if sandbox is not None:
                await sandbox.close()


# --- connections ----------------------------------------------------------------------------------


async def connect(address: str, port: int, *, within_s: float) -> socket.socket:
    """Return a connection, retrying while nothing listens there yet.

    Raises:
        OSError: Nothing listened in time.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    pause = _RETRY_S
    while True:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(min(CONNECT_S, max(0.01, end - loop.time()))):
                await loop.sock_connect(sock, (address, port))
        except OSError:
            sock.close()
            if loop.time() + pause > end:
                raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)
            continue
        except BaseException:
            sock.close()
            raise
        _set_options(sock)
        return sock


def _set_options(sock: socket.socket) -> None:
    """Send calls without delay, and detect a node that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _UNANSWERED_MS),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def open_authenticated(
    address: str, port: int, key: bytes, purpose: Mapping[str, Any], *, within_s: float = CONNECT_S
) -> socket.socket:
    """Return a connection, for a purpose, to the process 1 that has a key.

    Raises:
        OSError: Nothing answers, or the peer does not have the key.
    """
    sock = await connect(address, port, within_s=within_s)
    try:
        async with asyncio.timeout(CONNECT_S):
            await authenticate(sock, key, purpose)
    except BaseException:
        sock.close()
        raise
    return sock


class ControlConnection:
    """Keeps an instance owned by this host, and reports the cause and log of its end."""

    def __init__(self, sock: socket.socket, on_ended: Callable[[EndCause, str], None]) -> None:
        self._sock = sock
        self._on_ended = on_ended
        self._answers: asyncio.Queue[bool] = asyncio.Queue(_MAX_ANSWERS)
        self._moving = asyncio.Lock()
        self._task = asyncio.create_task(self._read_messages())

    async def _read_messages(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = b""
        try:
            while piece := await loop.sock_recv(self._sock, _PIECE_BYTES):
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    message = parse_report(line)
                    if "ended" in message:
                        inside = inside_cause(message.get("inside"))
                        cause = EndCause(str(message["ended"]), inside)
                        self._on_ended(cause, str(message.get("log") or ""))
                    else:
                        self._answers.put_nowait(True)
                if len(buffer) > MAX_REPORT_BYTES:
                    break
        except (OSError, ValueError, asyncio.QueueFull):
            pass  # the API reports what happened to the pod
        finally:
            if self._answers.full():
                self._answers.get_nowait()
            self._answers.put_nowait(False)

    async def move_deadline(self, ends_in_s: float) -> bool:
        """Set the deadline, in seconds from now; return False if the pod does not answer."""
        async with self._moving:
            if self._task.done():
                return False
            line = json.dumps({"ends_in_s": ends_in_s}).encode() + b"\n"
            try:
                async with asyncio.timeout(CONNECT_S):
                    await asyncio.get_running_loop().sock_sendall(self._sock, line)
                    return await self._answers.get()
            except OSError:  # includes timeouts
                return False

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._sock.close()


async def read_log(sock: socket.socket) -> AsyncGenerator[bytes, None]:
    """Yield what arrives on a connection for logs, until it ends."""
    loop = asyncio.get_running_loop()
    with sock:
        while piece := await loop.sock_recv(sock, _PIECE_BYTES):
            yield piece
