"""The contract between a host and whatever makes sandboxes.

An *engine* makes sandboxes on one node for one host actor. A *sandbox* is one of them: it holds one
instance of an environment and answers the fast door's methods. Everything above this file, the
actors, handles and samplers, knows these classes and no engine.

What every engine guarantees, and `aenv_ray.testing.engine_contract` checks:

- A sandbox outlives the host that made it, until its deadline: a new host with the same id attaches
  to it and calls go on. It is no child of the host and inherits no descriptor of it.
- Nothing of it is left after `Engine.stop`, after its deadline by more than 10 s, or after the end
  of whatever the engine was told owns it, whoever was killed in between.
- Its end is reported with a cause in words. A dead sandbox never answers a call with a result.
- It sees the environment variables, arguments and labels of its spec and none of the host's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import pydantic_core

from aenv_ray.errors import AenvError, ConfigError, SandboxLost
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.storage import StorageMount

OnProgress = Callable[[float, float | None, str | None], None]
"""Told ``progress``, ``total`` (None when unknown) and a message."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; stated, never assumed."""

    isolation: str
    """The strongest it offers: ``namespaces``, ``container``, ``none`` …"""
    network_modes: frozenset[str] = frozenset({"host"})
    attach: bool = True
    """A new host can take over a running sandbox."""
    second_container: bool = False
    snapshot: bool = False
    pause: bool = False
    storage: bool = False
    """Sandboxes may have storage that outlives them; see `Engine.delete_storage`."""
    slow_start: bool = False
    """A start takes so long that hosts anticipate demand (design D9)."""


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox to make."""

    instance_id: InstanceId
    project_dir: Path
    """The unpacked project on this node; read-only for everyone."""
    config: EnvironmentConfig
    deadline: float
    """Seconds since the epoch; the engine ends the sandbox then, also when the host is gone."""
    environment_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The caller's; the config's are added below them."""
    arguments: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    datasource: str = ""
    storage: StorageMount | None = None
    """What of it outlives it; only engines with the capability are asked for that."""


@dataclass(frozen=True)
class RunningSandbox:
    """What an engine's own listing says of a sandbox that really exists."""

    instance_id: InstanceId
    host_id: HostId
    deadline: float


class Sandbox(ABC):
    """One running sandbox, as its host sees it.

    Safe for any number of concurrent `request` calls on one event loop.
    """

    instance_id: InstanceId
    isolation: Isolation
    start_mode: str
    """How it came to be, for people: ``template``, or ``bare: <reason>``."""

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
        """Send one call and wait for its result, both as JSON text: nothing is decoded on the way.

        Args:
            method: A fast-door method, for example ``tools/call``.
            params: Its parameters, a JSON object on one line; ``_meta`` carries ``aenv/call_id``,
                and a ``progressToken`` where `on_progress` is given.
            deadline_s: Seconds after which the sandbox counts as not answering. Longer than the
                call's own timeout, which the runtime enforces.
            on_progress: Told of the call's progress.
            may_wait: It may be sent some milliseconds later, together with those that follow it.

        Returns:
            The JSON-RPC result.

        Raises:
            ToolError: The runtime refused or stopped the call; the concrete class says why.
            SandboxLost: The sandbox ended before it answered.
            CallOutcomeUnknown: `deadline_s` passed without an answer.

        Cancelling tells the runtime to stop the call and passes on at once.
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
        """Send one call and wait for its result, as data; otherwise like `request_json`."""
        if on_progress is not None:
            meta = {"progressToken": "p", **params.get("_meta", {})}
            params = {**params, "_meta": meta}
        result = await self.request_json(
            method, pydantic_core.to_json(params), deadline_s=deadline_s, on_progress=on_progress
        )
        return pydantic_core.from_json(result)

    @property
    @abstractmethod
    def end_cause(self) -> str | None:
        """Why the sandbox ended, in words; None while it runs."""

    @abstractmethod
    def on_end(self, callback: Callable[[str], None]) -> None:
        """Have `callback` told the cause when the sandbox ends; at once when it has."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; the sandbox runs on. Does nothing on later calls."""


class Engine(ABC):
    """Makes and ends the sandboxes of one host.

    Args given to the constructors of concrete engines are that engine's own; every engine takes a
    ``host_id``, under which a restarted host finds its sandboxes again.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    async def start_many(self, specs: Sequence[SandboxSpec]) -> list[Sandbox | AenvError]:
        """Make sandboxes and wait until each answers calls or has failed.

        Args:
            specs: Distinct instance ids.

        Returns:
            In the order of `specs`, a sandbox or the error that kept it from starting
            (`SandboxStartFailed` with the reason and the last lines of its log, `ConfigError`,
            `CapacityExceeded`). A failed one has left nothing behind.

        Raises:
            FabricUnavailable: The node cannot make sandboxes at all.
            DeadlineExceeded: What makes them on the node did not answer; those under way are ended.

        Cancelling ends those that were under way.
        """

    @final
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Make one sandbox.

        Raises:
            AenvError: As in the result of `start_many`.
        """
        (started,) = await self.start_many([spec])
        if isinstance(started, AenvError):
            raise started
        return started

    @abstractmethod
    async def attach(self, instance_id: InstanceId) -> Sandbox:
        """Connect to a sandbox that an earlier host of the same id made.

        Raises:
            SandboxLost: It does not run any more.
        """

    @abstractmethod
    async def running(self) -> list[RunningSandbox]:
        """Return this host's sandboxes that really exist: asked of what runs them, not of us."""

    @abstractmethod
    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:
        """End sandboxes with everything in them, and return when they are gone.

        Unknown and ended ids do nothing. Works while calls are under way: those get `SandboxLost`.
        """

    @abstractmethod
    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:
        """Move a sandbox's deadline, in seconds since the epoch.

        Raises:
            SandboxLost: It does not run any more.
        """

    @abstractmethod
    def logs(
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield what a sandbox printed: standard output and error of all that runs in it.

        Args:
            instance_id: Of a sandbox that this engine object started or attached to.
            tail_lines: Begin with so many of the last lines, at least 0. None: with all that is
                kept, which is the end of it; what is gone says so where the engine knows.
            follow: Go on with what is printed from now on, until the sandbox ends.

        Returns:
            Pieces of output as they came; one may end within a line or a character.

        Raises:
            SandboxLost: It does not run.
            FabricUnavailable: What runs it does not answer.

        Closing the generator ends it; any number may run at once.
        """

    async def delete_storage(self, storage: StorageMount) -> None:
        """Delete a storage with all that is in it, once no sandbox has it; one that is not is gone.

        Raises:
            ConfigError: This engine keeps none.
            FabricUnavailable: A sandbox has it still, or what keeps it refuses.
        """
        raise ConfigError(f"the {self.name} engine keeps no storage: {storage.name}")

    @abstractmethod
    async def close(self) -> None:
        """Disconnect from the node; sandboxes run on, for the next host of the same id."""


def check_os(config: EnvironmentConfig, own: str, whose: str) -> None:
    """Refuse a project that is for another operating system.

    Args:
        config: The project's.
        own: What sandboxes run on: ``linux``, ``darwin`` …
        whose: Operating system that is, for the message.

    Raises:
        ConfigError: They are not the same; the message names both.
    """
    wanted = config.deploy.os
    if wanted and wanted.lower() != own.lower():
        raise ConfigError(
            f"{config.reference} is for {wanted} (deployConfig.os), and {whose} runs {own}",
            hint="run it where that is, with an engine that has it, or change deployConfig.os",
        )


def lost(instance_id: InstanceId, cause: str) -> SandboxLost:
    """Return the error for a sandbox that ended."""
    return SandboxLost(
        f"the sandbox of {instance_id} is gone: {cause}",
        instance_id=instance_id,
        hint="create a new instance; what ran in this one counts as neither success nor failure",
    )
