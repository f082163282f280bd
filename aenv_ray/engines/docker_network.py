"""The network of sandboxes that may reach the internet and nothing else (invariant 7).

A bridge of the node's scope, on which containers do not see each other, and rules of the node's
packet filter that refuse everything it sends to the node itself and to addresses that are not
public: other nodes, Ray, Redis, a cloud's metadata service. Where the rules cannot be set there is
no such network: a sandbox is never given more than was asked for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.docker_files import SCOPE_LABEL, locked

NOT_PUBLIC: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
"""Addresses that no sandbox reaches (RFC 6890), the node's own besides."""
RESOLVERS: Final = ("1.1.1.1", "8.8.8.8")
"""A node's own resolver is mostly at an address that sandboxes must not reach."""
_COMMAND_DEADLINE_S: Final = 30.0
_HOOKS: Final = ("DOCKER-USER", "INPUT")


class RulesRefused(Exception):
    """The node's packet filter cannot be changed; the message says why."""


def network_name(scope: str) -> str:
    """Return the name of a scope's network."""
    return f"aenv-internet-{_short(scope)}"


def bridge_name(scope: str) -> str:
    """Return the name of its interface on the node, at most 15 characters."""
    return f"aenv{_short(scope)}"


def _short(scope: str) -> str:
    return hashlib.sha256(scope.encode()).hexdigest()[:10]


def network_body(scope: str) -> dict[str, Any]:
    """Return what the daemon makes a scope's network from."""
    return {
        "Name": network_name(scope),
        "CheckDuplicate": True,
        "Driver": "bridge",
        "EnableIPv6": False,
        "Labels": {SCOPE_LABEL: scope},
        "Options": {
            "com.docker.network.bridge.name": bridge_name(scope),
            "com.docker.network.bridge.enable_icc": "false",
            "com.docker.network.bridge.enable_ip_masquerade": "true",
        },
    }


def apply_rules(scope: str, lock: Path) -> None:
    """Have the node refuse what a scope's sandboxes must not reach; a second time does nothing.

    Args:
        scope: Whose bridge it is.
        lock: File that keeps two hosts of the node apart.

    Raises:
        RulesRefused: The packet filter cannot be changed from here.
    """
    bridge, chain = bridge_name(scope), _chain(scope)
    refuse = "-j REJECT --reject-with icmp-port-unreachable"
    lines = [
        "*filter",
        f":{chain} - [0:0]",
        f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN",
        *(f"-A {chain} -d {block} {refuse}" for block in NOT_PUBLIC),
        f":{chain}-IN - [0:0]",
        f"-A {chain}-IN -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN",
        f"-A {chain}-IN {refuse}",
        "COMMIT",
        "",
    ]
    with locked(lock):
        _run("iptables-restore", "--noflush", "--wait", text="\n".join(lines))
        for hook, target in zip(_HOOKS, (chain, f"{chain}-IN"), strict=True):
            rule = (hook, "-i", bridge, "-j", target)
            if not _holds("--check", *rule):
                _run("iptables", "--wait", "--insert", *rule)


def remove_rules(scope: str) -> None:
    """Take a scope's rules back; rules that are not there are none."""
    if shutil.which("iptables") is None:
        return
    bridge, chain = bridge_name(scope), _chain(scope)
    for hook, target in zip(_HOOKS, (chain, f"{chain}-IN"), strict=True):
        _holds("--delete", hook, "-i", bridge, "-j", target)
        _holds("--flush", target)
        _holds("--delete-chain", target)


def _chain(scope: str) -> str:
    return f"AENV-{_short(scope)}"


def _holds(*arguments: str) -> bool:
    command = ["iptables", "--wait", *arguments]
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=_COMMAND_DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode == 0


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
