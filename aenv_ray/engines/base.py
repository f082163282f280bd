"""The contract between a host actor and the engine that makes its sandboxes.

An *engine* makes sandboxes on one node for one host actor. A *sandbox* holds one instance of an
environment and answers the fast door's methods. Actors, handles and samplers use these classes and
no concrete engine.

Every engine guarantees, and `aenv_ray.testing.engine_contract` checks:

- A sandbox outlives the host that made it, until its deadline: a new host with the same id attaches
  to it and calls continue. It is not a child of the host and inherits none of its descriptors.
- Nothing is left of a sandbox after `Engine.stop`, 10 s after its deadline, or after the end of the
  process that the engine was given as owner, whichever processes were killed in between.
- The end of a sandbox is reported with a cause in words, which says whether something inside ended
  it (`EndCause`). A dead sandbox never answers a call with a result.
- A sandbox sees the environment variables, arguments and labels of its spec and none of the host's.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket
from types import MappingProxyType
from typing import Any, Final, final

import pydantic_core

from aenv_ray.errors import (
    AenvError,
    ConfigError,
    InsideCause,
    SandboxDiedInside,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.storage import StorageMount
from aenv_ray.runtime.door.roles import DoorRole

MAX_VALUES: Final = 16_000_000
"""Maximum number of JSON values in one result. An empty list takes 3 bytes of JSON and 64 of
memory, so a result of the largest size could take 5 GiB of the process that reads it."""
MAX_REQUEST_VALUES: Final = 2_000_000
"""Maximum number of JSON values in anything else that a sandbox sends."""

logger = logging.getLogger(__name__)

OnProgress = Callable[[float | None, float | None, str | None], None]
"""Takes progress, total and message. Without a progress, the message is the JSON text of a note for
the caller, see `aenv_ray.runtime.door.caller_link`."""
"""Called with ``progress``, ``total`` (None if unknown) and a message."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do."""

    isolation: str
    """The strongest kind that it offers: ``namespaces``, ``container``, ``none`` …"""
    network_modes: frozenset[str] = frozenset({"host"})
    attach: bool = True
    """A new host can take over a running sandbox."""
    second_container: bool = False
    snapshot: bool = False
    pause: bool = False
    storage: bool = False
    """Sandboxes can have storage that outlives them; see `Engine.delete_storage`."""
    slow_start: bool = False
    """Starts are slow, so hosts start sandboxes ahead of demand."""
    starts_elsewhere: bool = False
    """Starts take little of the host's own node, so hosts may start many at the same time."""


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox to make."""

    instance_id: InstanceId
    project_dir: Path
    """The unpacked project on this node; nobody writes to it."""
    config: EnvironmentConfig
    deadline: float
    """Seconds since the epoch; the engine ends the sandbox then, even without its host."""
    environment_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Given by the caller; they override the variables of the config."""
    arguments: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    datasource: str = ""
    storage: StorageMount | None = None
    """Storage that outlives the sandbox; only given to engines with the capability."""


@dataclass(frozen=True)
class RunningSandbox:
    """A sandbox that exists, as the engine lists it."""

    instance_id: InstanceId
    host_id: HostId
    deadline: float


@dataclass(frozen=True)
class EndCause:
    """Why a sandbox ended.

    An agent can end its sandbox on purpose, so such an end counts as an outcome of its episode.
    `inside` is set if, and only if, something in the sandbox caused the end; not for a release, a
    deadline, a signal from outside, or a node without memory.
    """

    text: str
    """For people."""
    inside: InsideCause | None = None

    def __str__(self) -> str:
        return self.text

    def with_log(self, log: str) -> EndCause:
        """Return the cause with the end of the sandbox's log, if there is any."""
        log = log.strip()
        return replace(self, text=f"{self.text}; the end of its log:\n{log}") if log else self


HostService = Callable[[dict[str, Any]], Awaitable[bytes]]
"""Returns the JSON of an answer to a request's parameters; raises AenvError."""


class Sandbox(ABC):
    """One running sandbox, as its host sees it.

    `request` may be called concurrently on one event loop.
    """

    instance_id: InstanceId
    isolation: Isolation
    start_mode: str
    """How it was started, for people: ``template``, or ``bare: <reason>``."""
    services: Mapping[str, HostService] = MappingProxyType({})
    """What its runtime may request of its host, by method. Set by the host."""

    @abstractmethod
    async def request_json(
        self,
        method: str,
        params: bytes,
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        may_wait: bool = False,
    ) -> bytes:
        """Send one call and wait for its result, both as JSON text.

        Args:
            method: A fast-door method, for example ``tools/call``.
            params: Its parameters, a JSON object on one line. Its ``_meta`` contains
                ``aenv/call_id``, and a ``progressToken`` if `on_progress` is given.
            deadline_s: Seconds after which the sandbox counts as not answering; longer than the
                call's own timeout, which the runtime enforces.
            on_progress: Called when the runtime reports progress of the call.
            may_wait: The call may be delayed by milliseconds, to be sent with others.

        Returns:
            The JSON-RPC result.

        Raises:
            ToolError: The runtime refused or stopped the call; the subclass says why.
            SandboxLost: The sandbox ended before it answered; `SandboxDiedInside` if something in
                it ended it.
            CallOutcomeUnknown: `deadline_s` passed without an answer; or the sandbox has not read
                earlier calls, so this one was not sent.

        Cancelling tells the runtime to stop the call and does not wait for that.
        Idempotent by call id: a repeated id returns the first outcome and runs nothing.
        """

    @final
    async def request(
        self,
        method: str,
        params: dict[str, Any],
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
    ) -> Any:
        """Send one call as `request_json` does, with parameters and result as Python data."""
        if on_progress is not None:
            meta = {"progressToken": "p", **params.get("_meta", {})}
            params = {**params, "_meta": meta}
        result = await self.request_json(
            method, pydantic_core.to_json(params), deadline_s=deadline_s, on_progress=on_progress
        )
        return read_json(result)

    async def open_door(self, role: DoorRole) -> socket:
        """Return a new connection to the door, for a caller on this node.

        The connection belongs to the caller of this method, and outlives the host. Its peer can
        call what its role may call; nothing that is sent on it changes the role.

        Args:
            role: `OWNER` or `AGENT`.

        Raises:
            OSError: The sandbox does not answer, or is not the one that this engine started.
            ConfigError: Sandboxes of this engine can only be reached through their host.
        """
        raise ConfigError(
            f"the door of {self.instance_id} can be reached only through its host",
            hint="call it through its host: set AENV_LOCAL_DOOR=0",
        )

    @property
    @abstractmethod
    def end_cause(self) -> EndCause | None:
        """Return why the sandbox ended; None while it runs."""

    @abstractmethod
    def on_end(self, callback: Callable[[EndCause], None]) -> None:
        """Call `callback` with the cause when the sandbox ends; at once if it has ended."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; the sandbox keeps running. Later calls do nothing."""


class Engine(ABC):
    """Makes and ends the sandboxes of one host.

    Constructors differ between engines; each takes a ``host_id``, by which a restarted host finds
    its sandboxes again.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    async def start_many(self, specs: Sequence[SandboxSpec]) -> list[Sandbox | AenvError]:
        """Start sandboxes and wait until each answers calls or has failed.

        Args:
            specs: Their instance ids are distinct.

        Returns:
            In the order of `specs`, each sandbox or the error that prevented its start
            (`SandboxStartFailed` with the reason and the last lines of its log, `ConfigError`,
            `CapacityExceeded`). A failed start leaves nothing behind.

        Raises:
            FabricUnavailable: The node cannot start sandboxes at all.
            DeadlineExceeded: The node's launcher or daemon did not answer; unfinished starts are
                undone.

        Cancelling ends the sandboxes that were being started.
        """

    @final
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start one sandbox.

        Raises:
            AenvError: Any that `start_many` raises or returns.
        """
        (started,) = await self.start_many([spec])
        if isinstance(started, AenvError):
            raise started
        return started

    @abstractmethod
    async def attach(self, instance_id: InstanceId) -> Sandbox:
        """Connect to a sandbox that an earlier host with the same id started.

        Raises:
            SandboxLost: It no longer runs.
        """

    @abstractmethod
    async def running(self) -> list[RunningSandbox]:
        """Return this host's sandboxes that exist, according to the launcher, daemon or API."""

    @abstractmethod
    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:
        """End sandboxes with everything in them, and return when they are gone.

        An engine may return earlier, once their end is certain and nobody can reach them; `ending`
        counts those. A sandbox with storage is gone when this returns. Unknown and ended ids are
        ignored. Pending calls fail with `SandboxLost`.

        Raises:
            AenvError: The end of one could not be confirmed; that of every other was tried.
        """

    def ending(self) -> int:
        """Return how many stopped sandboxes are not gone yet; they still use their slots."""
        return 0

    @abstractmethod
    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:
        """Move a sandbox's deadline, in seconds since the epoch.

        Raises:
            SandboxLost: It no longer runs.
        """

    @abstractmethod
    def logs(
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the output of a sandbox: standard output and error of all its processes.

        Args:
            instance_id: The id of a sandbox that this engine object started or attached to.
            tail_lines: Begin with this many of the last lines, at least 0. None: with the whole
                log, which is limited to its end; a mark says how much was cut, if that is known.
            follow: Continue with new output until the sandbox ends.

        Returns:
            Pieces of output, which may end within a line or a character.

        Raises:
            SandboxLost: It does not run.
            FabricUnavailable: The launcher, daemon or API does not answer.

        Any number of generators may run at once; each ends when it is closed.
        """

    async def delete_storage(self, storage: StorageMount) -> None:
        """Delete a storage volume once no sandbox uses it; does nothing if it is missing.

        Raises:
            ConfigError: This engine has no storage.
            FabricUnavailable: A sandbox still uses it, or it cannot be deleted.
        """
        raise ConfigError(
            f"the {self.name} engine has no storage, so {storage.name} cannot be deleted",
            hint="delete it with the engine that created it",
        )

    def pods(self) -> Mapping[str, int]:
        """Return how many pods the host has, by phase; none of an engine that makes no pods."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Disconnect from the node; sandboxes keep running for the next host with the same id."""


def check_os(config: EnvironmentConfig, own: str, whose: str) -> None:
    """Check that a project is for the operating system of the sandboxes.

    Args:
        config: The project's config.
        own: The sandboxes' operating system: ``linux``, ``darwin`` …
        whose: What runs it, for the message, for example ``this node``.

    Raises:
        ConfigError: The project is for another one; the message names both.
    """
    wanted = config.deploy.os
    if wanted and wanted.lower() != own.lower():
        raise ConfigError(
            f"{config.reference} is for {wanted} (deployConfig.os), but {whose} runs {own}",
            hint=f"run it on a node or engine with {wanted}, or change deployConfig.os",
        )


def read_json(data: bytes, most_values: int = MAX_VALUES) -> Any:
    """Parse what a sandbox sent.

    Raises:
        ValueError: It is not JSON, or may have more values than allowed. Commas and brackets in
            texts count, too.
    """
    if len(data) > most_values:
        count = data.count(b",") + data.count(b"[") + data.count(b"{")
        if count > most_values:
            raise ValueError(f"JSON with up to {count} values; the limit is {most_values}")
    return pydantic_core.from_json(data)


def lost(instance_id: InstanceId, cause: EndCause | str) -> SandboxLost:
    """Return the error for a sandbox that ended.

    A cause given only as text does not count as one from inside.
    """
    message = f"the sandbox of {instance_id} is gone: {cause}"
    if isinstance(cause, EndCause) and cause.inside is not None:
        return SandboxDiedInside(
            message,
            died_of=cause.inside,
            instance_id=instance_id,
            hint="this is an outcome of what ran in it; create a new instance to continue",
        )
    return SandboxLost(
        message,
        instance_id=instance_id,
        hint="create a new instance; what ran in this one counts as neither success nor failure",
    )


async def start_each(
    start_one: Callable[[SandboxSpec], Awaitable[Sandbox | AenvError]],
    stop: Callable[[Sequence[InstanceId]], Coroutine[Any, Any, None]],
    specs: Sequence[SandboxSpec],
) -> list[Sandbox | AenvError]:
    """Start sandboxes at the same time.

    If this is cancelled, or `start_one` raises, those that have started are stopped: nobody knows
    them.

    Raises:
        ExceptionGroup: What `start_one` raised instead of returning it.
    """
    outcomes: dict[int, Sandbox | AenvError] = {}

    async def start(place: int) -> None:
        outcomes[place] = await start_one(specs[place])

    try:
        async with asyncio.TaskGroup() as group:
            for place in range(len(specs)):
                group.create_task(start(place))
    except BaseException:
        started = [one.instance_id for one in outcomes.values() if isinstance(one, Sandbox)]
        if started:
            try:
                await asyncio.shield(stop(started))
            except AenvError as exc:  # not instead of what is raised here
                logger.warning("sandboxes %s may run until their deadlines: %s", started, exc)
        raise
    return [outcomes[place] for place in range(len(specs))]


async def stop_each(
    stop_one: Callable[[InstanceId], Awaitable[None]], instance_ids: Sequence[InstanceId]
) -> None:
    """Stop sandboxes at the same time; a failure keeps none of the others from being stopped.

    Raises:
        AenvError: The first failure.
    """
    failures: list[AenvError] = []

    async def attempt(instance_id: InstanceId) -> None:
        try:
            await stop_one(instance_id)
        except AenvError as exc:
            failures.append(exc)

    async with asyncio.TaskGroup() as group:
        for instance_id in instance_ids:
            group.create_task(attempt(instance_id))
    if failures:
        raise failures[0]


def start_failed(
    instance_id: str, why: EndCause | str, hint: str | None = None
) -> SandboxStartFailed:
    """Return the error for an instance that did not start."""
    return SandboxStartFailed(
        f"{instance_id} did not start: {why}", instance_id=instance_id, hint=hint
    )
