"""How all HTTP clients of ours read addresses and headers: loopback, proxies, ``Retry-After``."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def is_loopback(host: str) -> bool:
    """Return whether a host name or IP address is one of loopback."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def is_proxied(url: str) -> bool:
    """Return whether the environment names a proxy for a URL; loopback is always direct."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return False
    proxies = getproxies()
    named = proxies.get(parts.scheme) or proxies.get("all")
    return bool(named) and not proxy_bypass(host)


def local_host(listens_on: str) -> str:
    """Return the host by which a URL on this machine reaches what listens on an address."""
    if listens_on in {"", "0.0.0.0"}:
        return "127.0.0.1"
    if listens_on == "::":
        return "[::1]"
    return f"[{listens_on}]" if ":" in listens_on else listens_on


def retry_after_s(headers: Mapping[str, str], default: float = 1.0) -> float:
    """Return the seconds that a ``Retry-After`` header asks for, as a number or a date.

    Args:
        headers: The headers of a response. A date is compared with its ``Date``.
        default: If it asks for none.
    """
    asked = headers.get("Retry-After") or ""
    if asked.replace(".", "", 1).isdecimal():
        return float(asked)
    try:
        pause = parsedate_to_datetime(asked) - parsedate_to_datetime(headers.get("Date") or "")
    except (TypeError, ValueError):  # no dates, or one with and one without a zone
        return default
    return max(0.0, pause.total_seconds())
