"""One instance of the kubernetes engine, as its host knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.kubernetes import causes, names
from aenv_ray.engines.kubernetes import spec as kubernetes_spec
from aenv_ray.engines.kubernetes.door import Control, enter
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import InstanceId

READERS_S: Final = 5.0
"""A pod that ended stays this long for those who still read what it printed."""


@dataclass
class Instance:
    """A pod of this host."""

    id: InstanceId
    name: str
    nonce: str
    ended: asyncio.Future[str]
    """Its cause, once it ended."""
    address: asyncio.Future[str]
    """Where it listens, once all its containers run."""
    failed: asyncio.Future[None]
    """What keeps it from starting; has no result."""
    uid: str = ""
    has_second: bool = False
    is_up: bool = False
    waits_for: str = ""
    """Why no node takes it, in the scheduler's words."""
    node: str = ""
    sandbox: DoorSandbox | None = None
    second: DoorSandbox | None = None
    controls: list[Control] = field(default_factory=list)
    readers: set[asyncio.Event] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None

    @classmethod
    def new(cls, instance_id: InstanceId, name: str, nonce: str) -> Instance:
        """Return one that has not started."""
        loop = asyncio.get_running_loop()
        ended, address, failed = (loop.create_future() for _ in range(3))
        return cls(instance_id, name, nonce, ended, address, failed)

    def owns(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod is this instance's, and not an earlier one's of the same name."""
        annotations = pod["metadata"].get("annotations") or {}
        return bool(annotations.get(names.NONCE) == self.nonce)

    def note(self, pod: Mapping[str, Any], gone: bool) -> str | None:
        """Note what the API says of its pod; return the cause when that means that it ended."""
        self.uid = pod["metadata"]["uid"]
        self.node = pod["spec"].get("nodeName") or ""
        self.waits_for = causes.unscheduled(pod) or ""
        if gone:
            return causes.end_cause(pod)
        if not self.is_up:
            failure = causes.start_failure(pod, self.id)
            if failure is not None:
                self._fail(failure)
                return None
        if causes.is_over(pod):
            return causes.end_cause(pod)
        address = causes.address(pod)
        if address is not None and not self.address.done():
            self.address.set_result(address)
        return None

    def _fail(self, failure: AenvError | causes.Unfitting) -> None:
        if not self.failed.done():
            self.failed.set_exception(failure)
            self.failed.exception()  # whoever waits is told; perhaps nobody does any more

    def end(self, cause: str) -> None:
        """Tell that it ended; the first cause stays."""
        if self.ended.done():
            return
        self.ended.set_result(cause)
        if self.timer is not None:
            self.timer.cancel()
        for sandbox in (self.sandbox, self.second):
            if sandbox is not None:
                sandbox.end(cause)

    async def control(self, key: HostKey, on_ended: Callable[[str, str], None]) -> None:
        """Become its host, in its own eyes.

        Args:
            key: Of this host.
            on_ended: Told cause and log.

        Raises:
            OSError: It does not answer.
        """

        def on_second_ended(cause: str, log: str) -> None:
            on_ended(causes.of_second(cause), log)

        await self.let_go()
        if self.has_second:
            sock = await self.enter(kubernetes_spec.SECOND_PORT, key, {"kind": "control"})
            self.controls.append(Control(sock, on_second_ended))
        sock = await self.enter(kubernetes_spec.PORT, key, {"kind": "control"})
        self.controls.append(Control(sock, on_ended))

    async def enter(self, port: int, key: HostKey, purpose: Mapping[str, Any]) -> Any:
        """Return a connection to one of its containers, for a purpose.

        Raises:
            OSError: It does not answer.
        """
        secret = key.secret(self.name, self.nonce, str(port))
        return await enter(self.address.result(), port, secret, purpose)

    async def move_deadline(self, ends_in_s: float) -> None:
        """Have it end so many seconds from now.

        Raises:
            FabricUnavailable: It does not answer.
        """
        for control in self.controls:
            if not await control.move_deadline(ends_in_s) and not self.ended.done():
                raise FabricUnavailable(f"{self.id} does not answer, so its deadline stays")

    async def let_go(self) -> None:
        """Close what makes this host its host."""
        controls, self.controls = self.controls, []
        for control in controls:
            await control.close()

    async def close(self) -> None:
        """Disconnect; it goes on."""
        if self.timer is not None:
            self.timer.cancel()
        await self.let_go()
        for sandbox in (self.sandbox, self.second):
            if sandbox is not None:
                await sandbox.close()
