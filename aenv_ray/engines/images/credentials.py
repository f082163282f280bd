"""Logins for registries, from Docker's own configuration: what ``docker login`` left on this node.

``config.json`` has them itself (``auths``), or names the program that keeps them (``credHelpers``
for one registry, ``credsStore`` for all): https://docs.docker.com/reference/cli/docker/login/. It
is read anew each time, for somebody may have logged in meanwhile. No password is logged or told.
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
"""A helper asks a key ring or a cloud's service."""
_HELPER_PREFIX: Final = "docker-credential-"
_HUB_KEY: Final = f"https://index.{HUB}/v1/"
"""Under which Docker keeps the login for its own registry."""
_TOKEN_USER: Final = "<token>"
"""The name that helpers give instead of a user's when what they keep is a token."""
_NOT_KEPT: Final = b"credentials not found"


class _Unusable(Exception):
    """A file or a helper does not say what it should; the message has no secret."""


@dataclass(frozen=True)
class Login:
    """What this node shows one registry."""

    auth: dict[str, str] | None = field(repr=False)
    """As the daemon wants it; None: this node is not logged in there."""
    trouble: str = ""
    """Why what was configured could not be had; "" when all is well."""

    @property
    def header(self) -> str:
        """The value of ``X-Registry-Auth``."""
        return _encoded(self.auth or {})


class Credentials:
    """The logins of one user on one node.

    Args:
        directory: Of ``config.json``: ``DOCKER_CONFIG``, else ``~/.docker``.

    No method raises: an image that anybody may pull needs no login, so what is wrong with one is
    told only when the registry refuses.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.json"

    async def login(self, registry: str) -> Login:
        """Return the login for a registry, ``HOST[:PORT]``."""
        try:
            return Login(await self._find(await asyncio.to_thread(self._read), registry))
        except _Unusable as exc:
            logger.warning("no login for registry %s: %s", registry, exc)
            return Login(None, str(exc))

    def _read(self) -> dict[str, Any]:
        try:
            config = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            config = {}
        except (OSError, ValueError) as exc:
            raise _Unusable(f"{self.path} cannot be read: {type(exc).__name__}") from exc
        if not isinstance(config, dict):
            raise _Unusable(f"{self.path} is no JSON object")
        parts = {}
        for name in ("auths", "credHelpers"):
            parts[name] = config.get(name) or {}
            if not isinstance(parts[name], dict):
                raise _Unusable(f"{name} in {self.path} is no JSON object")
        return {**parts, "credsStore": str(config.get("credsStore") or "")}

    async def _find(self, config: dict[str, Any], registry: str) -> dict[str, str] | None:
        key = _HUB_KEY if registry == HUB else registry
        helpers = config["credHelpers"]
        helper = helpers.get(registry) or helpers.get(key) or config["credsStore"]
        kept = await _ask(str(helper), key) if helper else None
        if kept is not None:
            return kept
        for written, entry in config["auths"].items():
            if _host(written) == registry and isinstance(entry, dict):
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
            return None  # an empty entry: a helper keeps it, or kept it once
        return {"username": str(user), "password": str(password), "serveraddress": key}


async def _ask(helper: str, key: str) -> dict[str, str] | None:
    """Return what a helper keeps for a registry; None for nothing.

    Raises:
        _Unusable: There is no such program, or it fails; what it printed is not told.
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
        raise _Unusable(f"{name} does not answer within {HELPER_DEADLINE_S:g} s") from exc
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        if _NOT_KEPT in answer.lower():
            return None
        raise _Unusable(f"{name} get failed with exit code {process.returncode}")
    try:
        said = json.loads(answer)
        user, secret = str(said["Username"]), str(said["Secret"])
    except (ValueError, KeyError, TypeError):
        raise _Unusable(f"{name} get does not answer as credential helpers do") from None
    if not secret:
        return None
    if user == _TOKEN_USER:
        return {"identitytoken": secret, "serveraddress": key}
    return {"username": user, "password": secret, "serveraddress": key}


def _host(key: str) -> str:
    """Return the registry that a key of ``config.json`` means; it may be an address."""
    host = key.partition("://")[2] or key
    host = host.partition("/")[0]
    return HUB if host == f"index.{HUB}" else host


def _encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
