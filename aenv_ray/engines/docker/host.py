"""A host of the docker engine on its node, and what keeps it present there.

It holds a lock, keeps the janitor running, and follows the daemon's events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray import daemon
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.node.docker_client import REQUEST_DEADLINE_S, DaemonRefused, DockerClient
from aenv_ray.engines.node.docker_labels import HOST_LABEL, SCOPE_LABEL
from aenv_ray.errors import FabricUnavailable
from aenv_ray.files import FileLock, is_locked
from aenv_ray.ids import HostId

logger = logging.getLogger(__name__)

_RECONNECT_S: Final = 0.5
WATCH_S: Final = 2.0
"""How often a host checks that the janitor runs, and what its kernel did."""


@dataclass(frozen=True)
class DockerHost:
    """A host, and what it shares with the other hosts of its scope on the node."""

    id: HostId
    scope: str
    """The scope, which is on the label of everything that the host creates."""
    client: DockerClient
    files: DockerFiles


class HostPresence:
    """Marks a host as present, keeps a janitor running, and follows the daemon's events.

    `on_gap` is awaited when events may have been missed; `on_watch` is called every `WATCH_S`.
    """

    def __init__(
        self,
        host: DockerHost,
        *,
        owner_pid: int,
        grace_s: float,
        on_event: Callable[[dict[str, Any]], None],
        on_gap: Callable[[], Awaitable[None]],
        on_watch: Callable[[], None],
    ) -> None:
        self._host = host
        self._locks = host.files.locks
        self._owner_pid = owner_pid
        self._grace_s = grace_s
        self._on_event = on_event
        self._on_gap = on_gap
        self._on_watch = on_watch
        self._lock: FileLock | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """Take the lock, start the janitor if none runs, and follow events from now on.

        Raises:
            FabricUnavailable: The daemon does not answer; nothing is held then.
        """
        self._host.files.prepare()
        try:
            self._lock = await self._locks.enter_host(self._host.id)
        except TimeoutError as exc:
            raise FabricUnavailable(
                f"the docker engine cannot start: {exc}",
                hint="another host of this node is starting or ending: try again",
            ) from exc
        try:
            await self._ensure_janitor()
            connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._tasks = [
                asyncio.create_task(self._follow_events(connected)),
                asyncio.create_task(self._watch()),
            ]
            await connected
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Release the lock and stop following; idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _ensure_janitor(self) -> None:
        if not await asyncio.to_thread(is_locked, self._locks.janitor):
            await daemon.start(
                "aenv_ray.engines.docker.janitor", str(self._host.files.directory),
                self._host.scope, self._host.client.path, str(self._owner_pid), str(self._grace_s),
                env=daemon.environment(),
            )  # fmt: skip

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._on_watch()
            try:
                await self._ensure_janitor()
            except OSError as exc:
                logger.warning("the janitor of containers does not start: %s", exc)

    async def _follow_events(self, connected: asyncio.Future[None]) -> None:
        """Follow events for ever; after a gap, check what ended meanwhile."""
        filters = {
            "type": ["container"],
            "event": ["kill", "die", "oom", "destroy"],
            "label": [f"{SCOPE_LABEL}={self._host.scope}", f"{HOST_LABEL}={self._host.id}"],
        }
        while True:
            try:
                async with self._host.client.stream(
                    "GET", "/events", params={"filters": filters}, opens_in_s=REQUEST_DEADLINE_S
                ) as events:
                    if connected.done():
                        await self._on_gap()
                    else:
                        connected.set_result(None)
                    async for event in events:
                        self._on_event(event)
            except (DaemonRefused, FabricUnavailable) as exc:
                if not connected.done():
                    connected.set_exception(
                        exc if isinstance(exc, FabricUnavailable)
                        else FabricUnavailable(f"the Docker daemon refused events: {exc.message}")
                    )  # fmt: skip
                    return
                logger.warning("the event stream of the Docker daemon ended: %s", exc)
            await asyncio.sleep(_RECONNECT_S)
