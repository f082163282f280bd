"""The containers of one host on its node's daemon: made, listed, looked at, removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any, Final

from aenv_ray.engines.base import RunningSandbox
from aenv_ray.engines.docker import files as docker_files
from aenv_ray.engines.docker import logs as docker_logs
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.link import Link
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.shielded import shielded
from aenv_ray.errors import FabricUnavailable
from aenv_ray.ids import HostId, InstanceId

REMOVED: Final = "its container was removed by somebody else"
LOG_LINES: Final = 50
"""What is told of the output of a container that died."""
LAST_WORDS_S: Final = 10.0
READERS_S: Final = 5.0
"""A container that ended stays this long for those who still read what it printed."""
SLOT_S: Final = 60.0
"""After this a host that waits for a place of the node goes on without: those that hold them are
stuck, and nothing that it started may wait for them."""
_SLOT_LOOK_S: Final = 0.02
REMOVAL_S: Final = 120.0
"""How long a container may take to go that others want to remove, too."""
FAILED_REMOVAL_S: Final = 10.0
"""How long a removal is asked for again that the daemon tried and could not do: its log driver and
its shims write below what it deletes ("directory not empty"), and are done a moment later."""
_OTHERS_REMOVAL_S: Final = 5.0
_AGAIN_S: Final = 0.05
DAEMON_AWAY: Final = (
    "the Docker daemon was killed or unreachable, and meanwhile or on its return {}"
)
"""What is told of an end that nobody saw."""
_KILLED_EXIT: Final = 137
_TERMINATED_EXIT: Final = 143
_UNKNOWN_EXIT: Final = 255
"""What a daemon says of an end that it missed; a process may exit with it, too."""


class Containers:
    """Requests about containers, in the words of the engine.

    Args:
        client: Of the node's daemon.
        files: Of the node's scope.
        scope: On the label of every container.
        host_id: Whose containers `rows` lists.

    Requests raise `FabricUnavailable` when the daemon does not answer, and `DaemonRefused` when it
    refuses, unless they say otherwise.
    """

    def __init__(
        self, client: DockerClient, files: DockerFiles, scope: str, host_id: HostId
    ) -> None:
        self._client = client
        self._files = files
        self._scope = scope
        self._host_id = host_id
        self._readers: dict[str, set[asyncio.Event]] = {}
        # In turn within a host, which also keeps those few that look for a place of the node.
        self._places = asyncio.Semaphore(docker_files.START_SLOTS)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the node's places for containers that are being made or removed."""
        async with self._places:
            slot = await self._take_slot()
            try:
                yield
            finally:
                if slot is not None:
                    os.close(slot)

    async def _take_slot(self) -> int | None:
        """Return what holds a place; None when nobody gives one back, and it is done without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOT_S):
                while True:
                    slot = self._files.take_slot()
                    if slot is not None:
                        return slot
                    await asyncio.sleep(_SLOT_LOOK_S)
        return None

    async def create(self, name: str, body: dict[str, Any]) -> str:
        """Make a container under a name, instead of a dead one that has it; return its id.

        Cancelled, it ends once the daemon has answered: that goes on making what its asker gave up,
        and whoever removes it then has to find it.
        """
        return await shielded(self._create(name, body))

    async def _create(self, name: str, body: dict[str, Any]) -> str:
        params = {"name": name}
        try:
            made = await self._client.request(
                "POST", "/containers/create", params=params, body=body
            )
        except DaemonRefused as exc:
            if exc.status != 409:
                raise
            # What an earlier host left under this name has ended, or it would have been adopted.
            await self.remove(name)
            made = await self._client.request(
                "POST", "/containers/create", params=params, body=body
            )
        return str(made["Id"])

    async def start(self, name: str, container_id: str, link: Link) -> None:
        """Start a container that was created, and give it what it waits for.

        Args:
            name: The container's.
            container_id: From `create`.
            link: To it.
        """
        try:
            await link.prepare(container_id)
            await self._client.request("POST", f"/containers/{name}/start")
            await link.begin()
        except OSError as exc:
            raise FabricUnavailable(f"the Docker daemon does not answer: {exc}") from exc

    async def rows(self, kind: str, *, running_only: bool) -> list[dict[str, Any]]:
        """Return the daemon's rows of this host's containers.

        Args:
            kind: The label that says which: first or second ones.
            running_only: Not those that have ended.

        Raises:
            FabricUnavailable: The daemon does not answer, or refuses.
        """
        filters = {
            "label": [
                f"{docker_labels.SCOPE_LABEL}={self._scope}",
                f"{docker_labels.HOST_LABEL}={self._host_id}",
                kind,
            ]
        }
        params = {"filters": filters, "all": 0 if running_only else 1}
        try:
            return list(await self._client.request("GET", "/containers/json", params=params))
        except DaemonRefused as exc:
            raise FabricUnavailable(f"the Docker daemon lists nothing: {exc.message}") from exc

    async def running(self) -> list[RunningSandbox]:
        """Return this host's instances whose first container runs."""
        found = []
        for row in await self.rows(docker_labels.INSTANCE_LABEL, running_only=True):
            labels, name = row["Labels"], row["Names"][0].lstrip("/")
            deadline = self._files.deadline(name, labels[docker_labels.DEADLINE_LABEL])
            instance_id = InstanceId(labels[docker_labels.INSTANCE_LABEL])
            found.append(RunningSandbox(instance_id, self._host_id, deadline))
        return found

    async def details(self, name: str) -> dict[str, Any]:
        """Return all that the daemon knows of a container."""
        return dict(await self._client.request("GET", f"/containers/{name}/json"))

    async def log(self, name: str) -> str:
        """Return the end of what a container printed."""
        return await self._client.log(name, LOG_LINES)

    async def last_words(self, name: str) -> str:
        """Return the same of one that is to be ended; "" when the daemon does not tell soon."""
        with contextlib.suppress(DaemonRefused, FabricUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                return await self.log(name)
        return ""

    async def logs(
        self, name: str, *, lines: int | None, ended: asyncio.Future[str] | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield what a container printed.

        Args:
            name: The container's.
            lines: The last ones to begin with. None: all that the daemon keeps.
            ended: Go on until this is done. None: what there is now.
        """
        finished = asyncio.Event()
        readers = self._readers.setdefault(name, set())
        readers.add(finished)
        log = docker_logs.ContainerLog(self._client, name, lines)
        try:
            pieces = log.read() if ended is None else docker_logs.follow(log, ended)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            finished.set()
            readers.discard(finished)
            if not readers:
                self._readers.pop(name, None)

    async def let_readers_finish(self, name: str) -> None:
        """Wait until those who follow an ended container's log have all of it, for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READERS_S):
                for finished in list(self._readers.get(name, ())):
                    await finished.wait()

    async def remove(self, name: str) -> None:
        """End and remove a container; returns when it is gone, or never was.

        Raises:
            FabricUnavailable: The daemon could not.
        """
        loop, path = asyncio.get_running_loop(), f"/containers/{name}"
        began = loop.time()
        while True:
            try:
                await self._client.request("DELETE", path, params={"force": 1, "v": 1})
                return
            except DaemonRefused as exc:
                if exc.status == 404:
                    return
                if loop.time() - began >= _patience_s(exc.status):
                    raise FabricUnavailable(
                        f"the Docker daemon could not remove {name}: {exc.message}"
                    ) from exc
                is_with_others = exc.status == 409
            if is_with_others:
                await self._let_others_finish(path)
            else:
                await asyncio.sleep(_AGAIN_S)

    async def _let_others_finish(self, path: str) -> None:
        """Wait until a container is gone that somebody else removes just now, for a while.

        A removal that fails is told to nobody who waits for it, so whoever waits asks again.
        """
        try:
            await self._client.request(
                "POST", f"{path}/wait", params={"condition": "removed"},
                within_s=_OTHERS_REMOVAL_S,
            )  # fmt: skip
        except (DaemonRefused, FabricUnavailable):
            await asyncio.sleep(_AGAIN_S)

    async def remove_all(self, name: str, *, has_second: bool) -> None:
        """End and remove an instance's containers and what they share; those that are not are none.

        Args:
            name: Of the first container.
            has_second: There may be a second one.

        Raises:
            FabricUnavailable: The daemon could not.
        """
        if not has_second:
            await self.remove(name)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for container in (name, docker_files.second_name(name)):
                    group.create_task(self.remove(container))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        volume = docker_files.volume_name(name)
        try:
            await self._client.request("DELETE", f"/volumes/{volume}", params={"force": 1})
        except DaemonRefused as exc:
            if exc.status != 404:
                raise FabricUnavailable(
                    f"the Docker daemon could not remove {volume}: {exc.message}"
                ) from exc

    def cause(self, name: str, details: dict[str, Any], out_of_memory: Collection[str] = ()) -> str:
        """Return why a container ended, in words.

        Args:
            name: The container's.
            details: From `details`.
            out_of_memory: Names of containers of which the daemon told so when it happened; it does
                not always remember.
        """
        state = details["State"]
        left = self._files.cause(name)
        if left is not None:
            return left
        if state["Status"] == "removing":
            return REMOVED
        if name in out_of_memory or state.get("OOMKilled"):
            limit = details["HostConfig"].get("Memory") or 0
            bound = f"limit {limit >> 20} MiB" if limit else "the node had no more"
            return f"it ran out of memory and was killed ({bound})"
        code = int(state["ExitCode"])
        if state.get("Error"):
            return f"its container failed: {state['Error']}"
        if code == _KILLED_EXIT:
            return "its main process was killed by SIGKILL"
        if code == _TERMINATED_EXIT:
            return "its main process was ended by SIGTERM, as by a Docker daemon that stops"
        if code == _UNKNOWN_EXIT:
            return f"its main process ended, with code {code} or unseen by the daemon"
        return f"its main process exited with code {code}"


def _patience_s(status: int) -> float:
    """Return how long a removal is asked for again that the daemon refused."""
    if status == 409:
        return REMOVAL_S
    return FAILED_REMOVAL_S if status >= 500 else 0.0
