"""What a sandbox may reach, as an allow-list writes it: names, addresses, ranges, and ports."""

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
"""Addresses that no allow-list opens: loopback, a cloud's metadata service, no single machine."""
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(rf"({_LABEL}\.)*(?=[a-z0-9-]*[a-z]){_LABEL}", re.ASCII)
_HINT: Final = 'write it as "pypi.org:443", "10.1.2.3:5432" or "10.1.0.0/16"'


@dataclass(frozen=True)
class Destination:
    """One entry of an allow-list."""

    text: str
    """As it was written."""
    name: str
    """The name to be resolved; "" for addresses."""
    block: str
    """IPv4 addresses, ``a.b.c.d/n``; "" for a name."""
    port: int | None
    """TCP port. None: every port of every protocol."""


def parse_destination(text: object, *, what: str) -> Destination:
    """Return an entry of an allow-list.

    Args:
        text: A name, an IPv4 address or a range of them, with or without ``:PORT``.
        what: Names the entry in errors.

    Raises:
        ConfigError: Malformed, or something that no sandbox may reach.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{what} {text!r} is no text", hint=_HINT)
    host, colon, number = text.strip().lower().partition(":")
    if ":" in number:
        raise ConfigError(f"{what} {text!r}: sandboxes have IPv4 only", hint=_HINT)
    is_port = number.isascii() and number.isdecimal() and len(number) <= 5
    port = int(number) if is_port else None
    if colon and (port is None or not 0 < port < 65_536):
        raise ConfigError(f"{what} {text!r} has no port from 1 to 65535", hint=_HINT)
    if _NAME.fullmatch(host) and len(host) <= 253:
        return Destination(text, host, "", port)
    try:
        block = ipaddress.IPv4Network(host)
    except ValueError as exc:
        wildcard = "; a packet filter knows no names, so there is no *" if "*" in host else ""
        raise ConfigError(
            f"{what} {text!r} is no name, IPv4 address or range ({exc}){wildcard}", hint=_HINT
        ) from None
    closed = [str(never) for never in NEVER if never.overlaps(block)]
    if closed:
        raise ConfigError(
            f"{what} {text!r} holds addresses that no sandbox reaches: {', '.join(closed)}",
            hint='for every public address there is network "internet"',
        )
    return Destination(text, "", str(block), port)


def can_be_reached(address: str) -> bool:
    """Whether an allow-list can open an IPv4 address."""
    parsed = ipaddress.IPv4Address(address)
    return not any(parsed in block for block in NEVER)


def is_public(block: str) -> bool:
    """Whether a range of IPv4 addresses is part of the internet."""
    return ipaddress.IPv4Network(block).is_global
