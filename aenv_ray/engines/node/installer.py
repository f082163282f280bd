"""Runs uv with pip's configuration of package sources, which uv does not read itself.

The standard library alone: ``scripts/bootstrap.py`` uses it before anything is installed.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_MAX_OUTPUT: Final = 4000
"""Characters of an installer's output in an error, counted from its end."""
_TRUE = ("1", "true", "yes", "on")  # as pip reads it
_CREDENTIALS = re.compile(r"(?<=://)[^\s/'\"]+@")
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


async def failure_of(
    command: Sequence[str],
    *,
    deadline_s: float,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str | None:
    """Run an installer; return the end of its output if it fails, without passwords, else None.

    Args:
        command: The program and its arguments.
        deadline_s: After which it is ended.
        cwd: Its working directory.
        variables: In addition to those of this process.

    Raises:
        TimeoutError: It took longer than `deadline_s`.
        OSError: It cannot be run.

    Cancelling ends the command.
    """
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "NO_COLOR": "1", **(variables or {})},
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()  # the caller removes the files that it writes
        raise
    if not process.returncode:
        return None
    return without_passwords(output.decode(errors="replace")).strip()[-_MAX_OUTPUT:]
