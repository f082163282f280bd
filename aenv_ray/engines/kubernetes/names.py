"""Names, labels and annotations of the kubernetes engine's objects.

Labels are for selectors and NetworkPolicies, so they are few and short. Annotations hold what
people and hosts read, because they accept any text.
"""

from __future__ import annotations

import hashlib
from typing import Final

from aenv_ray.project.config import NetworkMode

MAIN_CONTAINER: Final = "instance"
SIDECAR_CONTAINER: Final = "sidecar"
CARRIER_CONTAINER: Final = "carrier"
UNPACKER_CONTAINER: Final = "unpacker"

PART_OF: Final = "app.kubernetes.io/part-of"
COMPONENT: Final = "app.kubernetes.io/component"
SANDBOX: Final = "sandbox"
STORAGE: Final = "storage"
NETWORK: Final = "aenv-ray.io/network"
"""Label: ``none`` or ``internet``, which NetworkPolicies select."""
OWNER_LABEL: Final = "aenv-ray.io/owner"
HOST_LABEL: Final = "aenv-ray.io/host"
STORAGE_LABEL: Final = "aenv-ray.io/storage"
"""Label of a claim: the id of its storage, which tells it from another claim of the same name."""

INSTANCE: Final = "aenv-ray.io/instance"
HOST: Final = "aenv-ray.io/host-id"
DEADLINE: Final = "aenv-ray.io/deadline"
"""Annotation: seconds since the epoch."""
NONCE: Final = "aenv-ray.io/nonce"
ISOLATION: Final = "aenv-ray.io/isolation"
START_MODE: Final = "aenv-ray.io/start-mode"
ENVIRONMENT: Final = "aenv-ray.io/environment"
LABELS: Final = "aenv-ray.io/labels"


def short_hash(text: str) -> str:
    """Return a hash of a text that is valid in any name or label."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def node_scope(scope: str) -> str:
    """Return the scope of the engine's directory on a node, created at its first use."""
    return f"{scope}/kubernetes"


def pod_name(owner_uid: str, instance_id: str) -> str:
    """Return the name of an instance's pod."""
    return f"aenv-{short_hash(f'{owner_uid}/{instance_id}')}"


def labels(owner_uid: str, host_id: str, network: NetworkMode) -> dict[str, str]:
    """Return the labels of a host's pod."""
    return {
        PART_OF: "aenv-ray",
        COMPONENT: SANDBOX,
        NETWORK: network.value,
        OWNER_LABEL: short_hash(owner_uid),
        HOST_LABEL: short_hash(host_id),
    }


def host_selector(owner_uid: str, host_id: str) -> str:
    """Return a selector for the pods of one host."""
    return f"{COMPONENT}={SANDBOX},{owner_selector(owner_uid)},{HOST_LABEL}={short_hash(host_id)}"


def owner_selector(owner_uid: str) -> str:
    """Return a selector for the pods of all hosts in one pod."""
    return f"{OWNER_LABEL}={short_hash(owner_uid)}"
