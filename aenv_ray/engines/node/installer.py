"""Runs uv with pip's configuration of package sources, which uv does not read itself.

This module imports only the standard library, because ``scripts/bootstrap.py`` uses it before
anything is installed.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

_MAX_OUTPUT: Final = 4000
"""Characters of an installer's output in an error, counted from its end."""
_KEPT_BYTES: Final = 1 << 20
"""Bytes at the end of the output that are searched for passwords, which can be longer than what is
shown."""
_PIECE_BYTES: Final = 65_536
_TRUE = ("1", "true", "yes", "on")  # as pip reads it
_CREDENTIALS = re.compile(r"(?<=://)[^\s/'\"]+@")
PYPI: Final = "https://pypi.org/simple"
_PYPI_FILES: Final = "files.pythonhosted.org"
_UV_SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL",
               "UV_FIND_LINKS")  # fmt: skip
_SOURCE_VARIABLES = ("HOME", "PIP_", "SSL_CERT_", "UV_", "XDG_")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_UV_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
                 "UV_NO_INDEX", "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS",
                 "UV_INSECURE_HOST", "UV_EXCLUDE_NEWER", "UV_PRERELEASE",
                 *_CERTIFICATES)  # fmt: skip
"""Beginnings of the names of variables that an installer in a sandbox gets."""
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index", "proxy", "cert")


def pip_settings() -> dict[str, str]:
    """Return pip's settings of package sources, proxy and certificates.

    From the files of the machine, the user, the virtual environment and ``PIP_CONFIG_FILE``, then
    from ``PIP_*`` variables; later ones override (pip's documentation, "Configuration").
    """
    home = Path(os.path.expanduser("~"))
    directories = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(d, "pip", "pip.conf") for d in directories.split(":")]
    files.append(Path("/etc/pip.conf"))
    # A container's user may have no home directory; then these paths are relative.
    files += [f for f in (home / ".pip" / "pip.conf", user / "pip" / "pip.conf") if f.is_absolute()]
    files.append(Path(sys.prefix, "pip.conf"))
    own = os.environ.get("PIP_CONFIG_FILE")
    files = [] if own == os.devnull else [*files, *([Path(own)] if own else [])]
    parser = configparser.RawConfigParser()
    for file in files:
        with contextlib.suppress(configparser.Error, UnicodeDecodeError, OSError):
            parser.read(file)
    found: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            found |= {k.replace("_", "-"): v for k, v in parser.items(section)}
    for name in _SOURCES:
        value = os.environ.get(f"PIP_{name.replace('-', '_').upper()}")
        if value:
            found[name] = value
    return {name: value for name, value in found.items() if name in _SOURCES}


def uv_options() -> list[str]:
    """Return the part of pip's configuration that uv accepts only as options."""
    is_offline = pip_settings().get("no-index", "").lower() in _TRUE
    return ["--no-index"] if is_offline and not _has_uv_sources() else []


def uv_variables() -> dict[str, str]:
    """Return pip's configuration as environment variables for uv.

    Every user of the machine can see options, and an index's address may contain a password.
    """
    settings = pip_settings()
    found = {"SSL_CERT_FILE": settings.get("cert", ""), "ALL_PROXY": settings.get("proxy", "")}
    if not _has_uv_sources():
        found["UV_DEFAULT_INDEX"] = settings.get("index-url", "")
        found["UV_INDEX"] = " ".join(settings.get("extra-index-url", "").split())
        found["UV_FIND_LINKS"] = ",".join(settings.get("find-links", "").split())
        # pip takes the best version of all sources; uv by default only of the first that has one.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if value and name not in os.environ}


def without_passwords(output: str) -> str:
    """Return an installer's output without the users and passwords in addresses.

    uv hides them, except in an address that it rejects, for example for a slash in the password.
    """
    known = {**os.environ, **pip_settings()}
    for name, value in known.items():
        if name.startswith(("PIP_", "UV_")) or name in _SOURCES:
            for address in re.split(r"[\s,]+", value):
                secret = address.partition("://")[2].rpartition("@")[0]
                output = output.replace(f"{secret}@", "****@") if secret else output
    return _CREDENTIALS.sub("****@", output)


def _has_uv_sources() -> bool:
    """Return whether the environment names package sources for uv."""
    return any(n.startswith(("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA")) for n in os.environ)


async def failure_of(command: Sequence[str], *, deadline_s: float) -> str | None:
    """Run uv with pip's package sources; return the end of its output if it fails, else None.

    Raises:
        TimeoutError: It took longer than `deadline_s`.
        OSError: It cannot be run.

    Cancelling ends the command.
    """
    variables = {**os.environ, "NO_COLOR": "1", **uv_variables()}
    status, output = await run_installer(command, deadline_s=deadline_s, variables=variables)
    return output if status else None


async def run_installer(
    command: Sequence[str], *, deadline_s: float, variables: Mapping[str, str], data: bytes = b""
) -> tuple[int, str]:
    """Run an installer; return its exit code and the end of its output, without passwords.

    Args:
        command: The program and its arguments.
        deadline_s: Seconds after which the program is ended.
        variables: All that it gets.
        data: Its standard input.

    Raises:
        TimeoutError: It took longer than `deadline_s`.
        OSError: It cannot be run.

    Cancelling ends the command, and returns when nothing of it is left that writes output.
    """
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(variables), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            output = await _exchanged(process, data)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()  # the caller removes the files that it writes
        raise
    status = process.returncode or 0
    return status, without_passwords(output.decode(errors="replace")).strip()[-_MAX_OUTPUT:]


async def _exchanged(process: asyncio.subprocess.Process, data: bytes) -> bytes:
    """Send a process its input; return the end of its output, which may have any length."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):  # it ended without reading its input
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
    end = b""
    while piece := await process.stdout.read(_PIECE_BYTES):
        end = (end + piece)[-_KEPT_BYTES:]
    await process.wait()
    return end


@dataclass(frozen=True)
class PackageSources:
    """Where the operator lets packages come from."""

    variables: dict[str, str]
    """For uv; may hold passwords."""
    options: list[str]
    """For uv."""
    proxies: dict[str, str]
    """This machine's proxies, as variables."""
    hosts: dict[str, str]
    """``host:port`` of each server, with the URL of the proxy to it; empty: none."""
    paths: list[str]
    """Files and directories that uv reads."""
    addresses: list[str]
    """The addresses of the indexes, without users and passwords."""
    has_password: bool


def package_sources(further_hosts: str = "") -> PackageSources:
    """Return the package sources that pip's and uv's configuration of this machine names.

    Args:
        further_hosts: ``host,host:port,…`` of servers that the indexes send their clients to.

    pip's files are read once for the same variables.
    """
    own = ((n, v) for n, v in os.environ.items() if n.startswith(_SOURCE_VARIABLES)
           or n.lower().endswith("_proxy"))  # fmt: skip
    return _package_sources(further_hosts, tuple(own))


@lru_cache(maxsize=4)
def _package_sources(further_hosts: str, own: tuple[tuple[str, str], ...]) -> PackageSources:
    given = {**dict(own), **uv_variables()}
    variables = {n: v for n, v in given.items() if v and n.startswith(_UV_VARIABLES)}
    addresses = [
        word.partition("=")[2] if re.match(r"[\w.-]+=", word) else word
        for name in _UV_SOURCES
        for word in re.split(r"[\s,]+", variables.get(name, ""))
        if word
    ]
    if not any(name in variables for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        addresses.append(PYPI)
    parts = [urlsplit(address) for address in addresses]
    servers = {(p.hostname, p.port or (80 if p.scheme == "http" else 443))
               for p in parts if p.hostname and p.scheme in ("http", "https")}  # fmt: skip
    for entry in filter(None, re.split(r"[\s,]+", further_hosts)):
        host, _, port = entry.partition(":")
        servers.add((host, int(port or 443)))
    if (urlsplit(PYPI).hostname, 443) in servers:
        servers.add((_PYPI_FILES, 443))
    paths = [unquote(p.path) for p in parts if p.scheme in ("", "file")]
    paths += [variables[name] for name in _CERTIFICATES if name in variables]
    found = getproxies()
    proxies = {f"{kind}_proxy": url for kind, url in found.items()}
    proxies |= {"ALL_PROXY": given["ALL_PROXY"]} if given.get("ALL_PROXY") else {}
    proxy = given.get("ALL_PROXY") or found.get("https") or found.get("all") or ""
    return PackageSources(
        variables=variables,
        options=uv_options(),
        proxies=proxies,
        hosts={f"{h}:{p}": "" if proxy_bypass(str(h)) else proxy for h, p in sorted(servers)},
        paths=[path for path in paths if os.path.exists(path)],
        addresses=[_CREDENTIALS.sub("", address) for address in addresses],
        has_password=any(p.username for p in parts)
        or any(name.endswith("_PASSWORD") for name in variables),
    )
