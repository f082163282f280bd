"""One instance of the kubernetes engine, as its host sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.kubernetes.pod_connection import ControlConnection, open_authenticated
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import InstanceId

READERS_S: Final = 5.0
"""How long a pod that ended is kept for readers of its log."""


@dataclass
class PodInstance:
    """A pod of this host, and the connections to it."""

    id: InstanceId
    name: str
    nonce: str
    ended: asyncio.Future[str]
    """The cause, once it has ended."""
    address: asyncio.Future[str]
    """Its address, once all its containers run."""
    failed: asyncio.Future[None]
    """The exception that prevents it from starting; never has a result."""
    uid: str = ""
    has_sidecar: bool = False
    is_up: bool = False
    unscheduled_reason: str = ""
    """Why the scheduler finds no node for it; "" if it is scheduled."""
    node: str = ""
    sandbox: DoorSandbox | None = None
    sidecar: DoorSandbox | None = None
    controls: list[ControlConnection] = field(default_factory=list)
    readers: set[asyncio.Event] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None

    @classmethod
    def new(cls, instance_id: InstanceId, name: str, nonce: str) -> PodInstance:
        """Return an instance that has not started."""
        loop = asyncio.get_running_loop()
        ended, address, failed = (loop.create_future() for _ in range(3))
        return cls(instance_id, name, nonce, ended, address, failed)

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod is this instance's, not an earlier instance's of the same name."""
        annotations = pod["metadata"].get("annotations") or {}
        return bool(annotations.get(names.NONCE) == self.nonce)

    def update(self, pod: Mapping[str, Any], gone: bool) -> str | None:
        """Update from the API's view of its pod; return the cause if the pod has ended."""
        self.uid = pod["metadata"]["uid"]
        self.node = pod["spec"].get("nodeName") or ""
        self.unscheduled_reason = pod_status.unscheduled(pod) or ""
        if gone:
            return pod_status.end_cause(pod)
        if not self.is_up:
            failure = pod_status.start_failure(pod, self.id)
            if failure is not None:
                self._fail(failure)
                return None
        if pod_status.is_over(pod):
            return pod_status.end_cause(pod)
        address = pod_status.address(pod)
        if address is not None and not self.address.done():
            self.address.set_result(address)
        return None

    def _fail(self, failure: AenvError | pod_status.UnsuitableImage) -> None:
        if not self.failed.done():
            self.failed.set_exception(failure)
            self.failed.exception()  # retrieved, in case nothing waits for it

    def end(self, cause: str) -> None:
        """Record that it ended; the first cause counts."""
        if self.ended.done():
            return
        self.ended.set_result(cause)
        if self.timer is not None:
            self.timer.cancel()
        for sandbox in (self.sandbox, self.sidecar):
            if sandbox is not None:
                sandbox.end(cause)

    async def take_control(self, key: HostKey, on_ended: Callable[[str, str], None]) -> None:
        """Become its host, from the pod's point of view.

        Args:
            key: Of this host.
            on_ended: Called with cause and log when it ends.

        Raises:
            OSError: It does not answer.
        """

        def on_sidecar_ended(cause: str, log: str) -> None:
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
        if self.timer is not None:
            self.timer.cancel()
        await self.release_control()
        for sandbox in (self.sandbox, self.sidecar):
            if sandbox is not None:
                await sandbox.close()
