"""Free ports that are still free when their program, seconds later, listens on them.

A port that the kernel names is one that it gives to any connection next; Ray, which starts
meanwhile, makes hundreds. So it is one of those that are given to nobody who does not ask for it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

FIRST_PORT: Final = 20_000
"""Ray's workers listen below: on 10002 to 19999 (``ray start --min-worker-port``)."""
_TRIES: Final = 20
_USUAL_FIRST_GIVEN: Final = 32_768
_GIVEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of this machine on which nobody listens.

    Args:
        host: The address to listen on; empty: all.

    Raises:
        OSError: The address is not this machine's, or there is no port left.
    """
    ours = range(FIRST_PORT, max(FIRST_PORT, _first_given()))
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


def _first_given() -> int:
    """Return the lowest port that the kernel gives to connections."""
    try:
        return int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_GIVEN
