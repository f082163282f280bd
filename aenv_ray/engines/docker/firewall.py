"""Networks of sandboxes that may reach the internet, or an allow-list, and nothing else.

A bridge, on which containers do not see each other, and rules of the node's packet filter that
refuse what it sends to the node itself and to wherever it must not: for the internet, addresses
that are not public (invariant 7: other nodes, Ray, Redis, a cloud's metadata service); for an
allow-list, all that is not on it. Where the rules cannot be set there is no such network: a sandbox
is never given more than was asked for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.engines.node.docker_labels import CHAIN_LABEL, SCOPE_LABEL

NOT_PUBLIC: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
"""Addresses that no sandbox with the internet reaches (RFC 6890), the node's own besides."""
RESOLVERS: Final = ("1.1.1.1", "8.8.8.8")
"""A node's own resolver is mostly at an address that sandboxes must not reach."""
NO_RESOLVERS: Final = ("127.0.0.1",)
"""Nobody answers there: whoever may ask a resolver for any name can tell it anything."""
NO_PATIENCE: Final = ("timeout:1", "attempts:1")
"""For that resolver: a name that is not on the list fails after a second, not after ten."""
_COMMAND_DEADLINE_S: Final = 30.0
_HOOKS: Final = ("DOCKER-USER", "INPUT")
_REFUSE: Final = "-j REJECT --reject-with icmp-port-unreachable"
_REPLIES: Final = "-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"


class RulesRefused(Exception):
    """The node's packet filter cannot be changed; the message says why."""


@dataclass(frozen=True, order=True)
class Opening:
    """Where an allow-list lets through."""

    block: str
    """IPv4 addresses, ``a.b.c.d/n``."""
    port: int = 0
    """TCP port; 0: every port of every protocol."""

    @property
    def match(self) -> str:
        """The packets, as the packet filter wants them described."""
        return f"-d {self.block}" + (f" -p tcp --dport {self.port}" if self.port else "")


@dataclass(frozen=True)
class Bridge:
    """A network of a scope.

    Attributes:
        scope: Whose it is.
        allow: The allow-list that it is for, as it is written; none: the internet.
    """

    scope: str
    allow: tuple[str, ...] = ()

    @property
    def _key(self) -> str:
        return _short("\n".join(sorted(self.allow)))[:8] if self.allow else ""

    @property
    def name(self) -> str:
        """What the daemon calls it."""
        if self.allow:
            return f"aenv-allow-{_short(self.scope)}-{self._key}"
        return f"aenv-internet-{_short(self.scope)}"

    @property
    def interface(self) -> str:
        """Its interface on the node, at most 15 characters."""
        if self.allow:
            return f"ae{_short(self.scope)[:5]}{self._key}"
        return f"aenv{_short(self.scope)}"

    @property
    def chain(self) -> str:
        """The packet filter's chain of its rules."""
        return f"{_chain(self.scope)}-{self._key}" if self.allow else _chain(self.scope)

    def body(self) -> dict[str, Any]:
        """Return what the daemon makes it from."""
        own = {CHAIN_LABEL: self.chain} if self.allow else {}
        return {
            "Name": self.name,
            "CheckDuplicate": True,
            "Driver": "bridge",
            "EnableIPv6": False,
            "Labels": {SCOPE_LABEL: self.scope, **own},
            "Options": {
                "com.docker.network.bridge.name": self.interface,
                "com.docker.network.bridge.enable_icc": "false",
                "com.docker.network.bridge.enable_ip_masquerade": "true",
            },
        }

    def rules(self, openings: Collection[Opening]) -> str:
        """Return its chains as ``iptables-restore`` wants them.

        Args:
            openings: Where its allow-list lets through.
        """
        chain = self.chain
        if self.allow:
            onward = [f"{opening.match} -j RETURN" for opening in sorted(openings)] + [_REFUSE]
        else:
            onward = [f"-d {block} {_REFUSE}" for block in NOT_PUBLIC]
        lines = [
            "*filter",
            f":{chain} - [0:0]",
            *(f"-A {chain} {rule}" for rule in (_REPLIES, *onward)),
            f":{chain}-IN - [0:0]",
            *(f"-A {chain}-IN {rule}" for rule in (_REPLIES, _REFUSE)),
            "COMMIT",
            "",
        ]
        return "\n".join(lines)

    @property
    def hooks(self) -> Sequence[tuple[str, ...]]:
        """The rules that send its packets to its chains."""
        targets = (self.chain, f"{self.chain}-IN")
        return [
            (hook, "-i", self.interface, "-j", target)
            for hook, target in zip(_HOOKS, targets, strict=True)
        ]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _chain(scope: str) -> str:
    return f"AENV-{_short(scope)}"


def apply_rules(bridge: Bridge, openings: Collection[Opening] = ()) -> None:
    """Have the node refuse what sandboxes on a bridge must not reach; again does nothing.

    Args:
        bridge: Where they are.
        openings: Where its allow-list lets through; instead of those before.

    Raises:
        RulesRefused: The packet filter cannot be changed from here.
    """
    _run("iptables-restore", "--noflush", "--wait", text=bridge.rules(openings))
    for rule in bridge.hooks:
        if not _holds("--check", *rule):
            _run("iptables", "--wait", "--insert", *rule)


def has_hooks(bridge: Bridge) -> bool:
    """Whether the packet filter sends a bridge's packets to its chains."""
    return all(_holds("--check", *rule) for rule in bridge.hooks)


def remove_rules(scope: str) -> None:
    """Take back the rules of all bridges of a scope; rules that are not there are none."""
    remove_chains(_chain(scope))


def remove_chains(prefix: str) -> None:
    """Take back the chains whose names begin so, and the rules that lead there."""
    if shutil.which("iptables") is None:
        return
    listed = subprocess.run(
        ["iptables", "--wait", "--list-rules"], capture_output=True, text=True, check=False,
        timeout=_COMMAND_DEADLINE_S, stdin=subprocess.DEVNULL,
    ).stdout.splitlines()  # fmt: skip
    rules = [line.split() for line in listed]
    for rule in rules:
        if rule[0] == "-A" and rule[-2] == "-j" and rule[-1].startswith(prefix):
            _holds("--delete", *rule[1:])
    chains = [rule[1] for rule in rules if rule[0] == "-N" and rule[1].startswith(prefix)]
    for action in ("--flush", "--delete-chain"):
        for chain in chains:
            _holds(action, chain)


def _holds(*arguments: str) -> bool:
    try:
        _run("iptables", "--wait", *arguments)
    except RulesRefused:
        return False
    return True


def _run(*command: str, text: str = "") -> None:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False,
            timeout=_COMMAND_DEADLINE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RulesRefused(f"{command[0]}: {exc}") from exc
    if done.returncode:
        raise RulesRefused(f"{command[0]}: {done.stderr.strip() or done.returncode}")
