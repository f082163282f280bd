"""Persistent storage of services: names, mount paths and sizes."""

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
"""Root directories of a sandbox where nothing can be mounted."""
_WHOLE: Final = frozenset({"/home", "/home/agent", "/root", "/tmp", "/var", "/var/tmp"})
"""Directories that cannot be replaced by a mount; a mount below them is allowed."""


class StorageMount(BaseModel):
    """A storage mounted in a sandbox."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^aenv-[a-z0-9-]{1,57}$")
    """Name of its directory or volume claim, from `storage_name`."""
    uid: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Random id; differs each time a storage volume with this name is created."""
    mount_path: str
    """Path in the sandbox."""
    size_bytes: int = Field(gt=0)
    is_shared: bool = False
    """Whether several sandboxes may mount it at once."""
    is_made: bool = False
    """Whether it exists already; if it is missing then, it is not created again."""


def storage_name(owner: str, service: str, label: str = "") -> str:
    """Return the name of a service's storage, unique per owner, service and label."""
    digest = hashlib.sha256(f"{owner}\0{service}\0{label}".encode()).hexdigest()[:20]
    return f"aenv-{service[:_STEM].strip('-')}-{digest}"


def check_mount_path(path: str) -> str:
    """Return a mount path without trailing slash.

    Raises:
        ConfigError: The path is not absolute and normalized, or hides what a sandbox needs.
    """
    clean = path.rstrip("/")
    first = clean.split("/")[1] if clean.startswith("/") else ""
    problem = ""
    if not first or posixpath.normpath(clean) != clean or clean.startswith("//"):
        problem = "is not an absolute, normalized path"
    elif len(clean) > _MAX_PATH or not clean.isprintable() or set(clean) & set(":,\\"):
        problem = f"is longer than {_MAX_PATH} characters, or has an invalid one"
    elif first in _SYSTEM or first.startswith(".") or clean in _WHOLE:
        problem = "would hide files that a sandbox needs"
    if problem:
        raise ConfigError(
            f"mount path {path[:_MAX_PATH]!r} {problem}",
            hint="choose a separate directory, for example /home/admin/data or /data",
        )
    return clean


def parse_size(text: str) -> int:
    """Return the bytes of ``10Gi``.

    Raises:
        ConfigError: It is not a size above zero.
    """
    return units.parse_memory_bytes(text, what="storage size")


def shown_size(size_bytes: int) -> str:
    """Return a size in the notation of Kubernetes, without rounding: ``10Gi``."""
    for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        number, rest = divmod(size_bytes, 1024**power)
        if number and not rest:
            return f"{number}{unit}"
    return str(size_bytes)
