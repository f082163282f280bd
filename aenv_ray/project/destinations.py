"""Entries of a network allow-list: names, addresses, ranges, and ports."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from aenv_ray.errors import ConfigError

NEVER: Final = tuple(
    ipaddress.IPv4Network(block)
    for block in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")
)
"""Addresses that an allow-list cannot open: loopback, link-local (metadata services), multicast."""
NOT_PUBLIC: Final = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
"""Addresses that sandboxes with the internet must not reach (RFC 6890), besides the node's own."""
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(rf"({_LABEL}\.)*(?=[a-z0-9-]*[a-z]){_LABEL}", re.ASCII)
_HINT: Final = 'write it as "pypi.org:443", "10.1.2.3:5432" or "10.1.0.0/16"'


@dataclass(frozen=True)
class Destination:
    """One entry of an allow-list."""

    text: str
    """The entry as written."""
    name: str
    """Name to resolve; "" for addresses."""
    block: str
    """IPv4 addresses, ``a.b.c.d/n``; "" for a name."""
    port: int | None
    """TCP port. None: every port of every protocol."""


def parse_destination(text: object, *, what: str) -> Destination:
    """Parse an entry of an allow-list.

    Args:
        text: A name, an IPv4 address or an IPv4 range, with or without ``:PORT``.
        what: Name of the entry, for errors.

    Raises:
        ConfigError: The entry is invalid, or cannot be opened for a sandbox.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{what} {text!r} is not text", hint=_HINT)
    host, colon, number = text.strip().lower().partition(":")
    if ":" in number:
        raise ConfigError(f"{what} {text!r}: sandboxes support only IPv4", hint=_HINT)
    is_port = number.isascii() and number.isdecimal() and len(number) <= 5
    port = int(number) if is_port else None
    if colon and (port is None or not 0 < port < 65_536):
        raise ConfigError(f"{what} {text!r}: the port is not a number from 1 to 65535", hint=_HINT)
    if _NAME.fullmatch(host) and len(host) <= 253:
        return Destination(text, host, "", port)
    try:
        block = ipaddress.IPv4Network(host)
    except ValueError as exc:
        wildcard = "; wildcards are not supported: packets have no names" if "*" in host else ""
        raise ConfigError(
            f"{what} {text!r} is not a name, IPv4 address or range ({exc}){wildcard}", hint=_HINT
        ) from None
    closed = [str(never) for never in NEVER if never.overlaps(block)]
    if closed:
        raise ConfigError(
            f"{what} {text!r} includes addresses that sandboxes cannot reach: {', '.join(closed)}",
            hint='for all public addresses use network "internet"',
        )
    return Destination(text, "", str(block), port)


def can_be_reached(address: str) -> bool:
    """Return whether an allow-list can open an IPv4 address."""
    parsed = ipaddress.IPv4Address(address)
    return not any(parsed in block for block in NEVER)


def is_public(block: str) -> bool:
    """Return whether all of a range of IPv4 addresses is public."""
    asked = ipaddress.IPv4Network(block)
    return not any(ipaddress.IPv4Network(other).overlaps(asked) for other in NOT_PUBLIC)
