"""Networks for sandboxes that may reach the internet, or an allow-list, and nothing else.

Each is a bridge without traffic between its containers, and rules of the node's packet filter. The
rules refuse traffic to the node itself and, for the internet, to addresses that are not public
(invariant 7: other nodes, Ray, Redis, a cloud's metadata service); for an allow-list, to everything
that is not on it. If the rules cannot be set, the network is not created: a sandbox never gets more
than it asked for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.engines.node.docker_labels import CHAIN_LABEL, SCOPE_LABEL
from aenv_ray.project.destinations import NOT_PUBLIC

RESOLVERS: Final = ("1.1.1.1", "8.8.8.8")
"""Public resolvers: that of a node usually has an address that sandboxes must not reach."""
_COMMAND_DEADLINE_S: Final = 30.0
_HOOKS: Final = ("DOCKER-USER", "INPUT")
_REFUSE: Final = "-j REJECT --reject-with icmp-port-unreachable"
_REPLIES: Final = "-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"


class RulesRefused(Exception):
    """The node's packet filter could not be changed; the message says why."""


@dataclass(frozen=True, order=True)
class Opening:
    """An entry of an allow-list, resolved."""

    block: str
    """IPv4 addresses, ``a.b.c.d/n``."""
    port: int = 0
    """TCP port; 0 allows every port and protocol."""

    @property
    def match(self) -> str:
        """The packets it allows, in the syntax of iptables."""
        return f"-d {self.block}" + (f" -p tcp --dport {self.port}" if self.port else "")


@dataclass(frozen=True)
class Bridge:
    """A network of a scope.

    Attributes:
        scope: The scope that its label names.
        allow: The allow-list, as the project writes it; empty for the internet.
    """

    scope: str
    allow: tuple[str, ...] = ()

    @property
    def _key(self) -> str:
        return _short("\n".join(sorted(self.allow)))[:8] if self.allow else ""

    @property
    def name(self) -> str:
        """Its name in the daemon."""
        if self.allow:
            return f"aenv-allow-{_short(self.scope)}-{self._key}"
        return f"aenv-internet-{_short(self.scope)}"

    @property
    def interface(self) -> str:
        """Its network interface on the node; at most 15 characters."""
        if self.allow:
            return f"ae{_short(self.scope)[:5]}{self._key}"
        return f"aenv{_short(self.scope)}"

    @property
    def chain(self) -> str:
        """The iptables chain of its rules."""
        return f"{_chain(self.scope)}-{self._key}" if self.allow else _chain(self.scope)

    def body(self) -> dict[str, Any]:
        """Return the request body that creates it."""
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
        """Return its chains in the format of ``iptables-restore``."""
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
        """The rules that send its packets through its chains."""
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
    """Set the rules of a bridge; idempotent.

    Raises:
        RulesRefused: The packet filter cannot be changed, for example without root.
    """
    _run("iptables-restore", "--noflush", "--wait", text=bridge.rules(openings))
    for rule in bridge.hooks:
        if not _succeeds("--check", *rule):
            _run("iptables", "--wait", "--insert", *rule)


def has_hooks(bridge: Bridge) -> bool:
    """Return whether the packet filter sends a bridge's packets through its chains."""
    return all(_succeeds("--check", *rule) for rule in bridge.hooks)


def remove_rules(scope: str) -> None:
    """Remove the rules of all bridges of a scope, if there are any."""
    remove_chains(_chain(scope))


def remove_chains(prefix: str) -> None:
    """Remove the chains whose names begin with a prefix, and the rules that jump to them."""
    if shutil.which("iptables") is None:
        return
    listed = subprocess.run(
        ["iptables", "--wait", "--list-rules"], capture_output=True, text=True, check=False,
        timeout=_COMMAND_DEADLINE_S, stdin=subprocess.DEVNULL,
    ).stdout.splitlines()  # fmt: skip
    rules = [line.split() for line in listed]
    for rule in rules:
        if rule[0] == "-A" and rule[-2] == "-j" and rule[-1].startswith(prefix):
            _succeeds("--delete", *rule[1:])
    chains = [rule[1] for rule in rules if rule[0] == "-N" and rule[1].startswith(prefix)]
    for action in ("--flush", "--delete-chain"):
        for chain in chains:
            _succeeds(action, chain)


def _succeeds(*arguments: str) -> bool:
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
