"""Logins for registries, from Docker's own configuration: what ``docker login`` wrote.

``config.json`` has them itself (``auths``), or names the program that stores them (``credHelpers``
for one registry, ``credsStore`` for all): https://docs.docker.com/reference/cli/docker/login/. It
is read for each pull and push, so that a new login takes effect at once. No password is logged or
shown. The docker package's own reader is not used: it has no deadline for a helper, and puts the
helper's output, which may hold the password, into its exceptions.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.images.reference import HUB

logger = logging.getLogger(__name__)

HELPER_DEADLINE_S: Final = 30.0
"""A helper may ask a key ring or a cloud service."""
_HELPER_PREFIX: Final = "docker-credential-"
_HUB_KEY: Final = f"https://index.{HUB}/v1/"
"""Docker's key for the login to its own registry."""
_TOKEN_USER: Final = "<token>"
"""The user name by which a helper says that the secret is a token."""
_NOT_FOUND: Final = b"credentials not found"


class _Unusable(Exception):
    """A file or a helper is broken; the message contains no secret."""


@dataclass(frozen=True)
class Login:
    """The login for one registry."""

    auth: dict[str, str] | None = field(repr=False)
    """In the daemon's format; None if this node is not logged in."""
    problem: str = ""
    """Why a configured login could not be read; "" if there was no problem."""

    @property
    def header(self) -> str:
        """The value of ``X-Registry-Auth``."""
        return _encoded(self.auth or {})


class Credentials:
    """The logins of one user on one node.

    `login` does not raise: a public image needs no login, so a problem with one is reported only if
    the registry refuses.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"

    async def login(self, registry: str) -> Login:
        """Return the login for a registry, ``HOST[:PORT]``."""
        try:
            return Login(await self._find(await asyncio.to_thread(self._read), registry))
        except _Unusable as exc:
            logger.warning("the login for registry %s cannot be read: %s", registry, exc)
            return Login(None, str(exc))

    def _read(self) -> dict[str, Any]:
        try:
            config = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            config = {}
        except (OSError, ValueError) as exc:
            raise _Unusable(f"{self.path} cannot be read: {type(exc).__name__}") from exc
        if not isinstance(config, dict):
            raise _Unusable(f"{self.path} is not a JSON object")
        parts = {}
        for name in ("auths", "credHelpers"):
            parts[name] = config.get(name) or {}
            if not isinstance(parts[name], dict):
                raise _Unusable(f"{name} in {self.path} is not a JSON object")
        return {**parts, "credsStore": str(config.get("credsStore") or "")}

    async def _find(self, config: dict[str, Any], registry: str) -> dict[str, str] | None:
        key = _HUB_KEY if registry == HUB else registry
        helpers = config["credHelpers"]
        helper = helpers.get(registry) or helpers.get(key) or config["credsStore"]
        found = await _ask_helper(str(helper), key) if helper else None
        if found is not None:
            return found
        for name, entry in config["auths"].items():
            if _host(name) == registry and isinstance(entry, dict):
                return self._entry(entry, registry, key)
        return None

    def _entry(self, entry: dict[str, Any], registry: str, key: str) -> dict[str, str] | None:
        if entry.get("identitytoken"):
            return {"identitytoken": str(entry["identitytoken"]), "serveraddress": key}
        user, password = entry.get("username"), entry.get("password")
        if entry.get("auth"):
            try:
                decoded = base64.b64decode(str(entry["auth"]), validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                decoded = ""
            user, colon, password = decoded.partition(":")
            if not colon:
                raise _Unusable(
                    f"auths of {registry} in {self.path} is not base64 of USER:PASSWORD"
                )
        if not (user and password):
            return None  # written by `docker login` with a helper
        return {"username": str(user), "password": str(password), "serveraddress": key}


async def _ask_helper(helper: str, key: str) -> dict[str, str] | None:
    """Return a helper's login for a registry; None if it has none.

    Raises:
        _Unusable: The program does not exist, or fails; its output is not shown.
    """
    name = f"{_HELPER_PREFIX}{helper}"
    program = shutil.which(name) if "/" not in helper else None
    if program is None:
        raise _Unusable(f"the program {name}, which Docker's config.json names, is not on PATH")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program, "get", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(HELPER_DEADLINE_S):
            answer, _ = await process.communicate(key.encode())
    except TimeoutError as exc:
        raise _Unusable(f"{name} did not answer within {HELPER_DEADLINE_S:g} s") from exc
    except RuntimeError as exc:  # uvloop's, where asyncio ignores the broken pipe
        raise _Unusable(f"{name} ended before it was asked") from exc
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        if _NOT_FOUND in answer.lower():
            return None
        raise _Unusable(f"{name} get failed with exit code {process.returncode}")
    try:
        fields = json.loads(answer)
        user, secret = str(fields["Username"]), str(fields["Secret"])
    except (ValueError, KeyError, TypeError):
        raise _Unusable(f"{name} get printed no valid answer of a credential helper") from None
    if not secret:
        return None
    if user == _TOKEN_USER:
        return {"identitytoken": secret, "serveraddress": key}
    return {"username": user, "password": secret, "serveraddress": key}


def _host(key: str) -> str:
    """Return the registry of a key of ``config.json``, which may be a URL."""
    host = key.partition("://")[2] or key
    host = host.partition("/")[0]
    return HUB if host == f"index.{HUB}" else host


def _encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
