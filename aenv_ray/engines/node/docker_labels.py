"""Labels on the containers, volumes and networks that aenv-ray creates in a Docker daemon."""

from __future__ import annotations

from typing import Final

SCOPE_LABEL: Final = "aenv.scope"
"""On everything: the scope. One janitor serves each scope."""
HOST_LABEL: Final = "aenv.host"
"""Id of the host that created the container."""
INSTANCE_LABEL: Final = "aenv.instance"
"""On an instance's main container: the instance id."""
SIDECAR_LABEL: Final = "aenv.sidecar-of"
"""On an instance's sidecar: the instance id."""
DEADLINE_LABEL: Final = "aenv.deadline"
"""Seconds since the epoch; a file in the scope's directory overrides it after a renewal."""
DIRECTORY_LABEL: Final = "aenv.directory"
"""Directory of the scope, so that any janitor can find the lock of the responsible one."""
ISOLATION_LABEL: Final = "aenv.isolation"
START_MODE_LABEL: Final = "aenv.start-mode"
LINK_LABEL: Final = "aenv.link"
"""On a container with its own kernel: how its host connects to it."""
STORAGE_LABEL: Final = "aenv.storage-bytes"
"""On a container whose disk use the janitor has to check: the limit."""
CHAIN_LABEL: Final = "aenv.chain"
"""On the network of an allow-list: its iptables chain."""
VOLUME_LABEL: Final = "aenv.volume"
"""On an instance's container and sidecar: their shared volume, removed with the last of them."""
USER_LABEL_PREFIX: Final = "aenv.label."
