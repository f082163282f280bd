"""Identifiers: how they look, how they are made, how they are parsed."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from typing import Final, NewType

from aenv_ray.errors import ConfigError

InstanceId = NewType("InstanceId", str)
"""``<environment name>-<8 lower-case letters and digits>``; unique, printable, DNS-safe."""

HostId = NewType("HostId", str)
"""Name of a host actor: the instance id when dedicated, ``host-<node>-<n>`` when shared."""

CallId = NewType("CallId", str)
"""Made by the caller, once per logical call; a repeat of it never runs the tool again (D6)."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._+-]{0,62}[A-Za-z0-9])?")
_SUFFIX_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_SUFFIX_LENGTH = 8
_MAX_NAME_IN_ID = 63 - _SUFFIX_LENGTH - 1  # a Kubernetes label value holds 63 characters


def new_instance_id(environment_name: str) -> InstanceId:
    """Return a fresh id for an instance of `environment_name`; 31**8 values per name."""
    suffix = "".join(secrets.choice(_SUFFIX_ALPHABET) for _ in range(_SUFFIX_LENGTH))
    return InstanceId(f"{environment_name[:_MAX_NAME_IN_ID].rstrip('-')}-{suffix}")


_numbers: Final = itertools.count()
_process = secrets.token_hex(12)


def _become_another() -> None:
    global _process
    _process = secrets.token_hex(12)


os.register_at_fork(after_in_child=_become_another)


def new_call_id() -> CallId:
    """Return a fresh call id: 96 random bits of this process, and a count, as hexadecimal text."""
    return CallId(f"{_process}{next(_numbers):x}")


def check_environment_name(name: str) -> str:
    """Return `name`.

    Raises:
        ConfigError: It is not 1-63 lower-case letters, digits and inner hyphens.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"environment name {name!r} is not valid",
            hint="use 1-63 lower-case letters, digits and hyphens, starting and ending with a "
            "letter or digit, for example my-env",
        )
    return name


def split_reference(reference: str) -> tuple[str, str | None]:
    """Split ``name@version`` or ``name``.

    Returns:
        The name and the version, None when the reference names none.

    Raises:
        ConfigError: The name or the version is malformed.
    """
    name, at, version = reference.partition("@")
    check_environment_name(name)
    if not at:
        return name, None
    if not _VERSION.fullmatch(version):
        raise ConfigError(
            f"version {version!r} in {reference!r} is not valid",
            hint="write name@version, for example mini-terminal@1.0.0",
        )
    return name, version
