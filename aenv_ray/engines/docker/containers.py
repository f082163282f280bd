"""The containers of one host on its node's daemon: created, listed, inspected, removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any, Final

from aenv_ray.background_tasks import shielded
from aenv_ray.engines.base import EndCause, RunningSandbox
from aenv_ray.engines.docker import janitor
from aenv_ray.engines.docker.files import START_PERMITS
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.link import Link
from aenv_ray.engines.docker.logs import ContainerLog, follow
from aenv_ray.engines.docker.names import sidecar_name, volume_name
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.errors import FabricUnavailable, InsideCause
from aenv_ray.files import FileLock
from aenv_ray.ids import InstanceId

REMOVED: Final = "its container was removed by somebody else"
LOG_LINES: Final = 50
"""How much of a dead container's output is reported."""
LAST_LOG_S: Final = 5.0
"""How long to wait for it; less than `CAUSE_WAIT_S` of `aenv_ray.engines.docker.instances`."""
READERS_S: Final = 5.0
"""How long an ended container is kept for those who still read its log."""
PERMIT_S: Final = 60.0
"""After this a host starts containers without a permit: the holders of all permits hang."""
_PERMIT_POLL_S: Final = 0.02
REMOVAL_S: Final = 120.0
"""How long a removal that conflicts with another one is retried."""
FAILED_REMOVAL_S: Final = 10.0
"""How long a removal that the daemon failed to do is retried: its log driver and shims write below
the directory that it deletes ("directory not empty") until a moment later."""
_OTHER_REMOVAL_S: Final = 5.0
_RETRY_S: Final = 0.05
DAEMON_AWAY: Final = (
    "the Docker daemon was killed or unreachable, and meanwhile or on its return {}"
)
"""The cause of an end that was not observed."""
EXPECTED: Final = (janitor.TTL_PASSED, janitor.HOST_GONE)
"""Causes for which the janitor ends containers, besides too much data; no log explains them."""
_KILLED_EXIT: Final = 137
_TERMINATED_EXIT: Final = 143
_UNKNOWN_EXIT: Final = 255
"""The daemon's exit code for an end that it missed; a process may also exit with it."""


class Containers:
    """Requests about the containers of one host.

    Requests raise `FabricUnavailable` if the daemon does not answer, and `DaemonRefused` if it
    refuses, unless they say otherwise.
    """

    def __init__(self, host: DockerHost) -> None:
        self.host = host
        self._client = host.client
        self._files = host.files
        self._readers: dict[str, set[asyncio.Event]] = {}
        # First come, first served within a host; and at most this many poll for a permit.
        self._permits = asyncio.Semaphore(START_PERMITS)

    # --- starts ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def start_permit(self) -> AsyncIterator[None]:
        """Hold one of the node's permits for containers that are being started or removed."""
        async with self._permits:
            permit = await self._take_permit()
            try:
                yield
            finally:
                if permit is not None:
                    permit.close()

    async def _take_permit(self) -> FileLock | None:
        """Wait for a permit; None if none becomes free within `PERMIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERMIT_S):
                while True:
                    permit = self._files.locks.take_permit()
                    if permit is not None:
                        return permit
                    await asyncio.sleep(_PERMIT_POLL_S)
        return None

    async def create(self, name: str, body: dict[str, Any]) -> str:
        """Create a container, replacing a dead one of the same name, and return its id.

        If it is cancelled, it ends once the daemon has answered.
        """
        return await shielded(self._create(name, body))

    async def _create(self, name: str, body: dict[str, Any]) -> str:
        params = {"name": name}
        try:
            created = await self._client.request(
                "POST", "/containers/create", params=params, body=body
            )
        except DaemonRefused as exc:
            if exc.status != 409:
                raise
            # A container of an earlier host that still ran would have been attached to.
            await self.remove(name)
            created = await self._client.request(
                "POST", "/containers/create", params=params, body=body
            )
        return str(created["Id"])

    async def start(self, name: str, container_id: str, link: Link) -> None:
        """Start a container that was created, and hand it what it waits for."""
        try:
            await link.before_start(container_id)
            await self._client.request("POST", f"/containers/{name}/start")
            await link.after_start()
        except OSError as exc:
            raise FabricUnavailable(
                f"the Docker daemon does not answer: {exc}",
                hint="check the daemon with: docker info",
            ) from exc

    # --- lists and facts ------------------------------------------------------------------------

    async def rows(self, label: str, *, running_only: bool) -> list[dict[str, Any]]:
        """Return the daemon's rows of this host's containers with a label.

        Raises:
            FabricUnavailable: The daemon does not answer, or refuses.
        """
        filters = {
            "label": [
                f"{docker_labels.SCOPE_LABEL}={self.host.scope}",
                f"{docker_labels.HOST_LABEL}={self.host.id}",
                label,
            ]
        }
        params = {"filters": filters, "all": 0 if running_only else 1}
        try:
            return list(await self._client.request("GET", "/containers/json", params=params))
        except DaemonRefused as exc:
            raise FabricUnavailable(
                f"the Docker daemon did not list containers: {exc.message}"
            ) from exc

    async def running(self) -> list[RunningSandbox]:
        """Return this host's instances whose main container runs."""
        found = []
        for row in await self.rows(docker_labels.INSTANCE_LABEL, running_only=True):
            labels, name = row["Labels"], row["Names"][0].lstrip("/")
            deadline = self._files.deadline(name, labels[docker_labels.DEADLINE_LABEL])
            instance_id = InstanceId(labels[docker_labels.INSTANCE_LABEL])
            found.append(RunningSandbox(instance_id, self.host.id, deadline))
        return found

    async def details(self, name: str) -> dict[str, Any]:
        """Return everything that the daemon knows about a container.

        Raises:
            DaemonRefused: There is no such container.
            FabricUnavailable: The daemon does not tell.
        """
        try:
            return dict(await self._client.request("GET", f"/containers/{name}/json"))
        except DaemonRefused as exc:
            if exc.status == 404:
                raise
            raise FabricUnavailable(
                f"the Docker daemon does not tell whether {name} runs: {exc.message}",
                hint="check the daemon with: docker info",
            ) from exc

    def recorded_cause(self, name: str) -> EndCause | None:
        """Return why the janitor ended a container; None if it did not."""
        recorded = self._files.cause(name)
        if recorded is None:
            return None
        return EndCause(recorded, None if recorded in EXPECTED else InsideCause.DISK)

    def cause(
        self,
        name: str,
        details: dict[str, Any],
        out_of_memory: Collection[str] = (),
        *,
        is_seen: bool = False,
        may_be_killed: bool = False,
        may_lack_memory: bool = False,
    ) -> EndCause:
        """Return why a container ended.

        Args:
            name: The name of the container.
            details: The daemon's answer.
            out_of_memory: Names of containers for which the daemon reported an out-of-memory kill
                when it happened; later it does not always know. Any process may have been killed,
                long before the end.
            is_seen: The daemon reported the end when it happened.
            may_be_killed: The daemon, or somebody by its means, has sent it a signal or may have.
            may_lack_memory: The kernel may have killed it because the node lacks memory.
        """
        state = details["State"]
        recorded = self.recorded_cause(name)
        if recorded is not None:
            return recorded
        if state["Status"] == "removing":
            return EndCause(REMOVED)
        code = int(state["ExitCode"])
        has_lacked_memory = name in out_of_memory or state.get("OOMKilled")
        if has_lacked_memory and code == _KILLED_EXIT and not may_be_killed:
            limit = details["HostConfig"].get("Memory") or 0
            bound = f"limit {limit >> 20} MiB" if limit else "the node had no more"
            words = f"it ran out of memory and was killed ({bound})"
            return EndCause(words, InsideCause.MEMORY if limit else None)
        if state.get("Error"):
            return EndCause(f"its container failed: {state['Error']}")
        # A process chooses its code, also that of a process that the kernel kills.
        is_own = code != _KILLED_EXIT or not may_lack_memory
        if is_seen and not may_be_killed and is_own:
            return EndCause(f"its main process exited with code {code}", InsideCause.EXIT)
        if code == _KILLED_EXIT:
            return EndCause("its main process was killed by SIGKILL")
        if code == _TERMINATED_EXIT:
            return EndCause(
                "its main process was ended by SIGTERM, for example as the Docker daemon stopped"
            )
        if code == _UNKNOWN_EXIT:
            return EndCause(
                f"its main process exited with code {code}, or unobserved by the Docker daemon"
            )
        return EndCause(f"its main process exited with code {code}", InsideCause.EXIT)

    # --- logs -----------------------------------------------------------------------------------

    async def log(self, name: str) -> str:
        """Return the end of a container's output."""
        return await self._client.log(name, LOG_LINES)

    async def last_log(self, name: str) -> str:
        """Return the same, for a container about to be ended; "" if the daemon is slow."""
        with contextlib.suppress(DaemonRefused, FabricUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_LOG_S):
                return await self.log(name)
        return ""

    async def logs(
        self, name: str, *, lines: int | None, ended: asyncio.Future[EndCause] | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield a container's output.

        Args:
            name: The name of the container.
            lines: How many of the last lines to begin with. None: all that the daemon keeps.
            ended: Follow the log until this is done. None: only what there is now.
        """
        finished = asyncio.Event()
        readers = self._readers.setdefault(name, set())
        readers.add(finished)
        log = ContainerLog(self._client, name, lines)
        try:
            pieces = log.read() if ended is None else follow(log, ended)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        finally:
            finished.set()
            readers.discard(finished)
            if not readers:
                self._readers.pop(name, None)

    async def wait_for_readers(self, name: str) -> None:
        """Wait for up to `READERS_S` until those who follow an ended container's log have it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READERS_S):
                for finished in list(self._readers.get(name, ())):
                    await finished.wait()

    # --- removal --------------------------------------------------------------------------------

    async def remove(self, name: str) -> None:
        """Kill and remove a container; returns when it is gone, or if it never existed.

        Raises:
            FabricUnavailable: The daemon could not remove it.
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
                if loop.time() - began >= _retry_for_s(exc.status):
                    raise FabricUnavailable(
                        f"the Docker daemon could not remove {name}: {exc.message}"
                    ) from exc
                is_conflict = exc.status == 409
            if is_conflict:
                await self._await_other_removal(path)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _await_other_removal(self, path: str) -> None:
        """Wait for a while until a removal that somebody else began is done.

        The daemon does not tell those who wait that a removal failed, so the caller retries.
        """
        try:
            await self._client.request(
                "POST", f"{path}/wait", params={"condition": "removed"},
                within_s=_OTHER_REMOVAL_S,
            )  # fmt: skip
        except (DaemonRefused, FabricUnavailable):
            await asyncio.sleep(_RETRY_S)

    async def remove_all(self, name: str, *, has_sidecar: bool) -> None:
        """Kill and remove an instance's containers and their volume, as far as they exist.

        Raises:
            FabricUnavailable: The daemon could not remove one of them.
        """
        if not has_sidecar:
            await self.remove(name)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for container in (name, sidecar_name(name)):
                    group.create_task(self.remove(container))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        volume = volume_name(name)
        try:
            await self._client.request("DELETE", f"/volumes/{volume}", params={"force": 1})
        except DaemonRefused as exc:
            if exc.status != 404:
                raise FabricUnavailable(
                    f"the Docker daemon could not remove {volume}: {exc.message}"
                ) from exc


def _retry_for_s(status: int) -> float:
    """Return how long a removal is retried that the daemon refused with a status."""
    if status == 409:
        return REMOVAL_S
    return FAILED_REMOVAL_S if status >= 500 else 0.0
