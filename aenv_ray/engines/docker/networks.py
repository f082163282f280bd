"""The networks that a host's containers join: made when one is to start, with their rules first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aenv_ray.engines.docker import firewall as docker_network
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.firewall import Bridge, Opening, RulesRefused
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.project import destinations
from aenv_ray.project.config import NetworkMode
from aenv_ray.project.destinations import Destination, parse_destination

RESOLVE_DEADLINE_S: Final = 10.0
RESOLVED_FOR_S: Final = 30.0
"""A burst of starts asks once for each name."""
_EXISTS: Final = 409
_LOCK_DEADLINE_S: Final = 60.0


@dataclass(frozen=True)
class Joined:
    """A network, as a container joins it."""

    name: str
    """What the daemon calls it."""
    dns: tuple[str, ...] = ()
    """Resolvers instead of the node's."""
    dns_options: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """``name:address`` of what is known without a resolver."""
    allowed: tuple[str, ...] = ()
    """What it reaches, for people; empty where that is not a list."""


class Networks:
    """Makes networks ready for the containers of a host.

    Args:
        client: Of the node's daemon.
        files: Of the node's scope.
        scope: Whose networks they are.
    """

    def __init__(self, client: DockerClient, files: DockerFiles, scope: str) -> None:
        self._client = client
        self._files = files
        self._scope = scope
        self._has_internet = False
        self._resolved: dict[str, tuple[float, tuple[str, ...]]] = {}

    @contextlib.asynccontextmanager
    async def joined(
        self, mode: NetworkMode, allow: Collection[str] | None
    ) -> AsyncIterator[Joined]:
        """Have a network for the container that is started within the block.

        Args:
            mode: Which kind.
            allow: Of an allow-list, its entries.

        Raises:
            ConfigError: This node cannot keep sandboxes within such a network.
            SandboxStartFailed: A name cannot be resolved.
            FabricUnavailable: The daemon does not answer.
        """
        if mode is NetworkMode.INTERNET:
            await self._ensure_internet()
            yield Joined(Bridge(self._scope).name, docker_network.RESOLVERS)
        elif mode is NetworkMode.ALLOWLIST:
            entries = [parse_destination(entry, what="deployConfig.allow") for entry in allow or ()]
            addresses = await self._resolve({entry.name for entry in entries if entry.name})
            bridge = Bridge(self._scope, tuple(allow or ()))
            hold = await asyncio.to_thread(self._files.hold_network, bridge.chain)
            try:
                openings = {o for entry in entries for o in _openings(entry, addresses)}
                await self._set_rules(bridge, openings)
                await self._make(bridge)
                yield _joined(bridge, entries, addresses)
            finally:
                os.close(hold)
        else:
            yield Joined(mode.value)

    async def _ensure_internet(self) -> None:
        if not self._has_internet:
            bridge = Bridge(self._scope)
            await self._set_rules(bridge, ())
            await self._make(bridge)
            self._has_internet = True

    async def _set_rules(self, bridge: Bridge, openings: Collection[Opening]) -> None:
        try:
            await asyncio.to_thread(self._add_rules, bridge, openings)
        except (RulesRefused, TimeoutError) as exc:
            kind = "allowlist" if bridge.allow else "internet"
            raise ConfigError(
                f'network "{kind}" cannot be had on this node: {exc}',
                hint='its rules need iptables and root; use "none" or "host", or run Ray as root',
            ) from exc

    def _add_rules(self, bridge: Bridge, openings: Collection[Opening]) -> None:
        """Set a bridge's rules; what its sandboxes reach already, they go on to reach."""
        with FileLock.acquire(self._files.network_lock, _LOCK_DEADLINE_S):
            known = self._files.openings(bridge.chain) if bridge.allow else set()
            wanted = known | {(opening.block, opening.port) for opening in openings}
            if not bridge.allow or wanted != known or not docker_network.has_hooks(bridge):
                docker_network.apply_rules(bridge, [Opening(*one) for one in wanted])
                if bridge.allow:
                    self._files.note_openings(bridge.chain, wanted)

    async def _make(self, bridge: Bridge) -> None:
        try:
            await self._client.request("POST", "/networks/create", body=bridge.body())
        except DaemonRefused as exc:
            if exc.status != _EXISTS:  # this host made it before, or another of this node
                raise SandboxStartFailed(
                    f"its network cannot be made: {exc.message}",
                    hint="a daemon has room for about thirty networks, one for each allow-list in "
                    "use; its setting default-address-pools gives it more",
                ) from exc

    async def _resolve(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        now = asyncio.get_running_loop().time()
        self._resolved = {n: held for n, held in self._resolved.items() if now < held[0]}
        found = {n: self._resolved[n][1] for n in names if n in self._resolved}
        async with asyncio.TaskGroup() as group:
            asked = {n: group.create_task(_look_up(n)) for n in names if n not in found}
        for name, task in asked.items():
            answer = task.result()
            if isinstance(answer, SandboxStartFailed):
                raise answer
            found[name] = answer
            self._resolved[name] = (now + RESOLVED_FOR_S, answer)
        return found


async def _look_up(name: str) -> tuple[str, ...] | SandboxStartFailed:
    """Return the addresses of a name that a sandbox may reach, or why there are none."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_DEADLINE_S):
            rows = await loop.getaddrinfo(
                name, None, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError) as exc:
        why = str(exc) or f"no answer after {RESOLVE_DEADLINE_S:g} s"
    else:
        addresses = sorted({str(row[4][0]) for row in rows})
        open_ones = tuple(a for a in addresses if destinations.can_be_reached(a))
        if open_ones:
            return open_ones
        why = f"it is {', '.join(addresses)}, which no sandbox reaches"
    return SandboxStartFailed(
        f"deployConfig.allow: {name} has no address for sandboxes: {why}",
        hint="names are resolved on the node when a sandbox starts",
    )


def _openings(entry: Destination, addresses: Mapping[str, tuple[str, ...]]) -> Collection[Opening]:
    if entry.block:
        return [Opening(entry.block, entry.port or 0)]
    return [Opening(f"{address}/32", entry.port or 0) for address in addresses[entry.name]]


def _joined(
    bridge: Bridge, entries: Collection[Destination], addresses: Mapping[str, tuple[str, ...]]
) -> Joined:
    allowed = [
        f"{entry.text} ({', '.join(addresses[entry.name])})" if entry.name else entry.text
        for entry in entries
    ]
    hosts = [f"{name}:{address}" for name in sorted(addresses) for address in addresses[name]]
    return Joined(
        bridge.name,
        dns=docker_network.NO_RESOLVERS,
        dns_options=docker_network.NO_PATIENCE,
        hosts=tuple(hosts),
        allowed=tuple(allowed),
    )
