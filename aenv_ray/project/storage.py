"""Storage that outlives sandboxes: what it is called, where a sandbox sees it, what is refused."""

from __future__ import annotations

import hashlib
import posixpath
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray import units
from aenv_ray.errors import ConfigError

_MAX_PATH: Final = 200
_STEM: Final = 30
_SYSTEM: Final = frozenset(
    {
        "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix", "opt", "proc",
        "project", "run", "sbin", "shared", "sys", "usr",
    }
)  # fmt: skip
"""Directories of a sandbox's root that nothing is put into."""
_WHOLE: Final = frozenset({"/home", "/home/agent", "/root", "/tmp", "/var", "/var/tmp"})
"""Directories that nothing is put in place of, though below them it may be."""


class StorageMount(BaseModel):
    """A storage as a sandbox gets it."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^aenv-[a-z0-9-]{1,57}$")
    """Of its directory or claim: `storage_name`."""
    uid: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Unguessable; another one each time a storage of this name is made."""
    mount_path: str
    """Where the sandbox sees it."""
    size_bytes: int = Field(gt=0)
    is_shared: bool = False
    """Several sandboxes may have it at once."""
    is_made: bool = False
    """It was there before: where it is not found, none is made."""


def storage_name(owner: str, service: str, label: str = "") -> str:
    """Return what a service's storage is called: one name for each owner, service and label."""
    digest = hashlib.sha256(f"{owner}\0{service}\0{label}".encode()).hexdigest()[:20]
    return f"aenv-{service[:_STEM].strip('-')}-{digest}"


def check_mount_path(path: str) -> str:
    """Return where a sandbox sees a storage, without a slash at the end.

    Raises:
        ConfigError: It is no absolute path in plain form, or in place of what a sandbox needs.
    """
    clean = path.rstrip("/")
    first = clean.split("/")[1] if clean.startswith("/") else ""
    problem = ""
    if not first or posixpath.normpath(clean) != clean or clean.startswith("//"):
        problem = "is no absolute path in plain form"
    elif len(clean) > _MAX_PATH or not clean.isprintable() or set(clean) & set(":,\\"):
        problem = f"is longer than {_MAX_PATH} characters, or has one that no mount takes"
    elif first in _SYSTEM or first.startswith(".") or clean in _WHOLE:
        problem = "would cover what a sandbox needs"
    if problem:
        raise ConfigError(
            f"mount path {path[:_MAX_PATH]!r} {problem}",
            hint="choose a directory of its own, such as /home/admin/data or /data",
        )
    return clean


def parse_size(text: str) -> int:
    """Return the bytes of ``10Gi``.

    Raises:
        ConfigError: It is no size above zero.
    """
    return units.parse_memory_bytes(text, what="storage size")


def shown_size(size_bytes: int) -> str:
    """Return a size as people and Kubernetes write it, exactly: ``10Gi``."""
    for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        number, rest = divmod(size_bytes, 1024**power)
        if number and not rest:
            return f"{number}{unit}"
    return str(size_bytes)
