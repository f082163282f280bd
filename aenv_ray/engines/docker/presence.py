"""A host's presence on a node: its lock, the janitor that looks after it, the daemon's events."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aenv_ray.engines.docker import janitor as docker_janitor
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import (
    REQUEST_DEADLINE_S,
    DaemonRefused,
    DockerClient,
    socket_path,
)
from aenv_ray.errors import FabricUnavailable
from aenv_ray.files import is_locked
from aenv_ray.ids import HostId

logger = logging.getLogger(__name__)

_RECONNECT_S: Final = 0.5
WATCH_S: Final = 2.0
"""How often a host looks whether the janitor is there."""


class Presence:
    """Holds what says that a host is there, and hears of the ends of its containers.

    Args:
        client: Of the node's daemon.
        address: The daemon's.
        files: Of the node's scope.
        scope: On the label of every container.
        host_id: Whose containers are heard of.
        owner_pid: Process with which everything ends.
        grace_s: How long containers wait for a host that went away.
        on_event: Told each event of the daemon.
        on_gap: Awaited when events may have been missed.
    """

    def __init__(
        self,
        client: DockerClient,
        *,
        address: str,
        files: DockerFiles,
        scope: str,
        host_id: HostId,
        owner_pid: int,
        grace_s: float,
        on_event: Callable[[dict[str, Any]], None],
        on_gap: Callable[[], Awaitable[None]],
    ) -> None:
        self._client = client
        self._address = address
        self._files = files
        self._scope = scope
        self._host_id = host_id
        self._owner_pid = owner_pid
        self._grace_s = grace_s
        self._on_event = on_event
        self._on_gap = on_gap
        self._lock = -1
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """Take the lock, make sure of the janitor, and hear of events from now on.

        Raises:
            FabricUnavailable: The daemon does not answer; nothing is held then.
        """
        self._files.prepare()
        self._lock = self._files.enter(self._host_id)
        try:
            await self._ensure_janitor()
            connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._tasks = [
                asyncio.create_task(self._follow_events(connected)),
                asyncio.create_task(self._watch_janitor()),
            ]
            await connected
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let go of everything; does nothing when nothing is held."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _ensure_janitor(self) -> None:
        if not await asyncio.to_thread(is_locked, self._files.janitor_lock):
            await asyncio.to_thread(
                docker_janitor.spawn, self._files.directory, self._scope,
                socket_path(self._address), self._owner_pid, self._grace_s,
            )  # fmt: skip

    async def _watch_janitor(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._ensure_janitor()
            except OSError as exc:
                logger.warning("the janitor of containers does not start: %s", exc)

    async def _follow_events(self, connected: asyncio.Future[None]) -> None:
        """Hear of every end, for ever; after a gap, ask what ended meanwhile."""
        filters = {
            "type": ["container"],
            "event": ["die", "oom", "destroy"],
            "label": [f"{docker_labels.SCOPE_LABEL}={self._scope}",
                      f"{docker_labels.HOST_LABEL}={self._host_id}"],
        }  # fmt: skip
        while True:
            try:
                async with self._client.stream(
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
                        else FabricUnavailable(f"the Docker daemon gives no events: {exc.message}")
                    )  # fmt: skip
                    return
                logger.warning("the events of the Docker daemon ended: %s", exc)
            await asyncio.sleep(_RECONNECT_S)
