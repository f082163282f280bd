"""Finds the volumes that an image declares (``VOLUME``) among the mounts of a container in a pod.

containerd gives each of them a writable directory on the node's disk, unless its setting
``ignore_image_defined_volumes`` is on. Kubernetes does not know these directories: no limit of the
pod counts what is written to them, and a read-only root does not include them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
_NOT_ON_DISK: Final = frozenset(
    {"cgroup", "cgroup2", "devpts", "devtmpfs", "mqueue", "proc", "ramfs", "sysfs", "tmpfs"}
)
"""Kinds of file systems that hold nothing, or what counts as memory of the container. Paths are no
sign: an image may declare ``VOLUME /dev/data``."""
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def image_volumes(mountinfo: str, known: Collection[str]) -> list[str]:
    """Return the writable directories on disk that are mounted and are no volumes of the pod.

    Files are not among them, such as ``/etc/hosts``, which the kubelet mounts: a file has a limit
    of its own.

    Args:
        mountinfo: Content of ``/proc/self/mountinfo``.
        known: Where the pod's volumes are mounted. Paths may lead through symbolic links.
    """
    paths = {"/", *map(os.path.realpath, known)}
    found = []
    for line in mountinfo.splitlines():
        mount, _, filesystem = line.partition(" - ")
        path = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), mount.split()[4])
        kind, _, of_all = filesystem.split()[:3]
        options = {*mount.split()[5].split(","), *of_all.split(",")}
        if "ro" in options or kind in _NOT_ON_DISK or path in paths:
            continue
        if os.path.isdir(path):
            found.append(path)
    return found
