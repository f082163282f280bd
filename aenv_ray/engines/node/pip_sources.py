"""Where pip's configuration says that packages come from, told to uv, which does not read it.

Standard library only, and nothing else of the package: ``scripts/bootstrap.py`` uses it as well,
before anything is installed.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import sys
from pathlib import Path

_TRUE = ("1", "true", "yes", "on")  # to pip
_CREDENTIALS = re.compile(r"(?<=://)[^\s/'\"]+@")
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index", "proxy", "cert")


def pip_settings() -> dict[str, str]:
    """Return where pip's own configuration says that packages come from.

    Its files in pip's order, the machine's, the user's, the virtual environment's and the one that
    ``PIP_CONFIG_FILE`` names, then ``PIP_*`` variables (pip's documentation, "Configuration").
    """
    home = Path(os.path.expanduser("~"))
    directories = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(d, "pip", "pip.conf") for d in directories.split(":")]
    files.append(Path("/etc/pip.conf"))
    # Without a home, as a container's user may be, these lead nowhere.
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
    """Return what of pip's configuration uv takes as an option alone."""
    is_alone = pip_settings().get("no-index", "").lower() in _TRUE
    return ["--no-index"] if is_alone and not _uv_is_told() else []


def uv_variables() -> dict[str, str]:
    """Return pip's configuration as environment variables for uv.

    Not as options, which everybody on this machine can see: an index's address may hold a password.
    """
    settings = pip_settings()
    found = {"SSL_CERT_FILE": settings.get("cert", ""), "ALL_PROXY": settings.get("proxy", "")}
    if not _uv_is_told():
        found["UV_DEFAULT_INDEX"] = settings.get("index-url", "")
        found["UV_INDEX"] = " ".join(settings.get("extra-index-url", "").split())
        found["UV_FIND_LINKS"] = ",".join(settings.get("find-links", "").split())
        # pip takes the best version of all its sources; uv would look into the first alone.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if value and name not in os.environ}


def without_passwords(words: str) -> str:
    """Return an installer's words without users and passwords of addresses.

    uv hides them itself, but not in an address that it refuses: a slash in a password is enough.
    """
    known = {**os.environ, **pip_settings()}
    for name, value in known.items():
        if name.startswith(("PIP_", "UV_")) or name in _SOURCES:
            for address in re.split(r"[\s,]+", value):
                secret = address.partition("://")[2].rpartition("@")[0]
                words = words.replace(f"{secret}@", "****@") if secret else words
    return _CREDENTIALS.sub("****@", words)


def _uv_is_told() -> bool:
    """Whether uv has package sources of its own."""
    return any(n.startswith(("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA")) for n in os.environ)
