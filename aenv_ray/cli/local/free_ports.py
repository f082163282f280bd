"""Free ports that stay free until a program listens on them, seconds later.

A port from the kernel's ephemeral range may be taken by any new connection meanwhile, and a
starting Ray makes hundreds. So ports are chosen below that range.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

FIRST_PORT: Final = 20_000
"""Above the ports of Ray's workers: 10002 to 19999 (``ray start --min-worker-port``)."""
_TRIES: Final = 20
_USUAL_FIRST_EPHEMERAL: Final = 32_768
_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine on which nobody listens.

    Args:
        host: Address to listen on; empty for all.

    Raises:
        OSError: This machine does not have the address, or no port is free.
    """
    ours = range(FIRST_PORT, max(FIRST_PORT, _first_ephemeral()))
    for port in random.sample(ours, k=min(_TRIES, len(ours))):
        try:
            return _bound(host, port)
        except OSError:
            continue
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, port))
        return int(sock.getsockname()[1])


def _first_ephemeral() -> int:
    """Return the lowest port of the kernel's ephemeral range."""
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_EPHEMERAL
