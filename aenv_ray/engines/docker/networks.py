"""The networks that a host's containers join; their rules are set before a container starts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aenv_ray.engines.docker import firewall
from aenv_ray.engines.docker.firewall import Bridge, Opening, RulesRefused
from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.errors import ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.policy import Policy
from aenv_ray.project import destinations
from aenv_ray.project.config import NetworkMode
from aenv_ray.project.destinations import Destination, parse_destination

RESOLVE_DEADLINE_S: Final = 10.0
RESOLVED_FOR_S: Final = 30.0
"""How long an address is cached, so that a burst of starts resolves each name once."""
_NO_RESOLVER: Final = "nameserver 127.0.0.1\n"
"""Nothing listens there, so names fail at once. A real resolver would leak data in its queries."""
_EXISTS: Final = 409
_SAME_BRIDGE: Final = "networks have same bridge name"
"""What the daemon says of a network that another request is creating."""
_CREATED_S: Final = 10.0
_CREATED_PAUSE_S: Final = 0.1
_LOCK_DEADLINE_S: Final = 60.0


@dataclass(frozen=True)
class ContainerNetwork:
    """The network of a container."""

    mode: NetworkMode
    name: str
    """The daemon's name for it: ``none``, ``host``, or that of a bridge."""
    resolvers: str = ""
    """The content of ``/etc/resolv.conf``."""
    hosts: tuple[tuple[str, str], ...] = ()
    """Addresses and names for ``/etc/hosts``."""
    allowed: tuple[str, ...] = ()
    """The allow-list, for people; empty for other modes."""


class DockerNetworks:
    """Creates the networks of a scope for the containers of one host."""

    def __init__(self, host: DockerHost) -> None:
        self._client = host.client
        self._locks = host.files.locks
        self._scope = host.scope
        self._is_internet_new = True
        """Another version may have set its rules."""
        self._creating = asyncio.Lock()
        self._resolved: dict[str, tuple[float, tuple[str, ...]]] = {}

    @contextlib.asynccontextmanager
    async def joined(
        self, mode: NetworkMode, allow: Collection[str] | None, policy: Policy
    ) -> AsyncIterator[ContainerNetwork]:
        """Provide a network for the container that is started within the block.

        Raises:
            ConfigError: This node cannot enforce such a network.
            PolicyRefused: The policy does not allow the addresses of a name.
            SandboxStartFailed: A name cannot be resolved.
            FabricUnavailable: The daemon does not answer.
        """
        if mode is NetworkMode.INTERNET:
            bridge = Bridge(self._scope)
            await self._set_rules(bridge, ())
            await self._create(bridge)
            resolvers = "".join(f"nameserver {address}\n" for address in firewall.RESOLVERS)
            yield ContainerNetwork(mode, bridge.name, resolvers)
        elif mode is NetworkMode.ALLOWLIST:
            async with self._allowlist(tuple(allow or ()), policy) as network:
                yield network
        else:
            yield ContainerNetwork(mode, mode.value, _NO_RESOLVER)

    @contextlib.asynccontextmanager
    async def _allowlist(
        self, allow: tuple[str, ...], policy: Policy
    ) -> AsyncIterator[ContainerNetwork]:
        entries = [parse_destination(entry, what="deployConfig.allow") for entry in allow]
        addresses = await self._resolve({entry.name for entry in entries if entry.name})
        for name, found in addresses.items():
            for address in found:  # which the owner of the name decides
                policy.check_destination(f"{address}/32", f"deployConfig.allow: {name}")
        bridge = Bridge(self._scope, allow)
        try:
            lock = await self._locks.use_network(bridge.chain)
        except TimeoutError as exc:
            raise FabricUnavailable(f"the network {bridge.name} is being removed: {exc}") from exc
        with lock:  # the janitor removes networks that nobody uses
            openings = {o for entry in entries for o in _openings(entry, addresses)}
            await self._set_rules(bridge, openings)
            await self._create(bridge)
            yield _allowlist_network(bridge, entries, addresses)

    async def _set_rules(self, bridge: Bridge, openings: Collection[Opening]) -> None:
        try:
            await asyncio.to_thread(self._add_rules, bridge, openings)
        except (RulesRefused, TimeoutError) as exc:
            kind = "allowlist" if bridge.allow else "internet"
            raise ConfigError(
                f'network "{kind}" is not available on this node: {exc}',
                hint='its rules need iptables and root; use "none" or "host", or run Ray as root',
            ) from exc

    def _add_rules(self, bridge: Bridge, openings: Collection[Opening]) -> None:
        """Set a bridge's rules, unless the packet filter has them.

        The openings of its running sandboxes stay.
        """
        with FileLock.acquire(self._locks.network_rules, _LOCK_DEADLINE_S):
            known = self._locks.openings(bridge.chain) if bridge.allow else set()
            wanted = known | {(opening.block, opening.port) for opening in openings}
            is_new = wanted != known if bridge.allow else self._is_internet_new
            if is_new or not firewall.has_hooks(bridge):
                firewall.apply_rules(bridge, [Opening(*one) for one in wanted])
                if bridge.allow:
                    self._locks.write_openings(bridge.chain, wanted)
                else:
                    self._is_internet_new = False

    async def _create(self, bridge: Bridge) -> None:
        """Create a network, unless it exists.

        A daemon refuses a network while another request is creating it. So one is created at a
        time, and one that another host of this node is creating is waited for.
        """
        async with self._creating:
            deadline = asyncio.get_running_loop().time() + _CREATED_S
            while (refusal := await self._refusal(bridge)) is not None:
                is_being_created = _SAME_BRIDGE in refusal.message
                if not is_being_created or asyncio.get_running_loop().time() > deadline:
                    raise SandboxStartFailed(
                        f"the network {bridge.name} cannot be created: {refusal.message}",
                        hint="by default a daemon has room for about thirty networks, one per "
                        "allow-list in use; its setting default-address-pools raises the limit",
                    ) from refusal
                await asyncio.sleep(_CREATED_PAUSE_S)

    async def _refusal(self, bridge: Bridge) -> DaemonRefused | None:
        """Return why a network cannot be created; None if it exists now."""
        try:
            await self._client.request("POST", "/networks/create", body=bridge.body())
        except DaemonRefused as exc:
            return None if exc.status == _EXISTS else exc
        return None

    async def _resolve(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        now = asyncio.get_running_loop().time()
        self._resolved = {n: cached for n, cached in self._resolved.items() if now < cached[0]}
        found = {n: self._resolved[n][1] for n in names if n in self._resolved}
        async with asyncio.TaskGroup() as group:
            lookups = {n: group.create_task(_look_up(n)) for n in names if n not in found}
        for name, task in lookups.items():
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
        reachable = tuple(a for a in addresses if destinations.can_be_reached(a))
        if reachable:
            return reachable
        why = f"it resolves to {', '.join(addresses)}, which sandboxes may not reach"
    return SandboxStartFailed(
        f"deployConfig.allow: {name} has no address for sandboxes: {why}",
        hint="check that the node can resolve it: names are resolved there when a sandbox starts",
    )


def _openings(entry: Destination, addresses: Mapping[str, tuple[str, ...]]) -> Collection[Opening]:
    if entry.block:
        return [Opening(entry.block, entry.port or 0)]
    return [Opening(f"{address}/32", entry.port or 0) for address in addresses[entry.name]]


def _allowlist_network(
    bridge: Bridge, entries: Collection[Destination], addresses: Mapping[str, tuple[str, ...]]
) -> ContainerNetwork:
    allowed = [
        f"{entry.text} ({', '.join(addresses[entry.name])})" if entry.name else entry.text
        for entry in entries
    ]
    return ContainerNetwork(
        NetworkMode.ALLOWLIST,
        bridge.name,
        # A name that is not on the list fails after one second instead of ten.
        f"{_NO_RESOLVER}options timeout:1 attempts:1\n",
        tuple((address, name) for name in sorted(addresses) for address in addresses[name]),
        tuple(allowed),
    )
