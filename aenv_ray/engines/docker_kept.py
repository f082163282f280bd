"""What of a container outlives it: how it is mounted, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.local_storage import LocalDirectory
from aenv_ray.runtime.container import SHARED_STORAGE_LOCK, STORAGE_LOCK
from aenv_ray.runtime.jail_spec import unlimited_storage
from aenv_ray.storage import shown_size


def storage_mounts(spec: SandboxSpec, directory: LocalDirectory | None) -> list[dict[str, Any]]:
    """Return the daemon's JSON for a container's storage; none where it has none."""
    if spec.storage is None or directory is None:
        return []
    lock = SHARED_STORAGE_LOCK if spec.storage.is_shared else STORAGE_LOCK
    pairs = ((directory.data, spec.storage.mount_path), (directory.lock, lock))
    return [
        {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": False}
        for source, target in pairs
    ]


def missing(spec: SandboxSpec) -> Sequence[str]:
    """Return what does not bound a container's storage, in words."""
    if spec.storage is None:
        return ()
    return (unlimited_storage(spec.storage.mount_path, shown_size(spec.storage.size_bytes)),)
