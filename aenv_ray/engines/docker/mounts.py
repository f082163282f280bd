"""What a container has beside its own: what outlives it, and what it shares with its second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.node.docker_labels import SCOPE_LABEL
from aenv_ray.engines.node.local_storage import LocalDirectory
from aenv_ray.project.storage import shown_size
from aenv_ray.runtime.container.process_one import SHARED_STORAGE_LOCK, STORAGE_LOCK
from aenv_ray.runtime.fork.jail_spec import unlimited_storage


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


def shared_volume(name: str, scope: str, target: str, size_bytes: int) -> dict[str, Any]:
    """Return the volume of both containers: in memory and bounded, made with the first of them."""
    options = f"mode=1777,nosuid,nodev,size={size_bytes}"
    return {
        "Type": "volume",
        "Source": name,
        "Target": target,
        "VolumeOptions": {
            "NoCopy": True,
            "Labels": {SCOPE_LABEL: scope},
            "DriverConfig": {
                "Name": "local",
                "Options": {"type": "tmpfs", "device": "tmpfs", "o": options},
            },
        },
    }
