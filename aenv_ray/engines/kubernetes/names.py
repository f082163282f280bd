"""What the kubernetes engine calls its things: pods, labels, annotations.

Labels are what selectors and NetworkPolicies see, so they are short and few; what people and hosts
read is in annotations, which take any text.
"""

from __future__ import annotations

import hashlib
from typing import Final

from aenv_ray.project.config import NetworkMode

PART_OF: Final = "app.kubernetes.io/part-of"
COMPONENT: Final = "app.kubernetes.io/component"
SANDBOX: Final = "sandbox"
STORAGE: Final = "storage"
NETWORK: Final = "aenv-ray.io/network"
"""Label: ``none``, ``internet``; what NetworkPolicies select."""
OWNER_LABEL: Final = "aenv-ray.io/owner"
HOST_LABEL: Final = "aenv-ray.io/host"
STORAGE_LABEL: Final = "aenv-ray.io/storage"
"""Of a claim: which storage it is, and no other of its name."""

INSTANCE: Final = "aenv-ray.io/instance"
HOST: Final = "aenv-ray.io/host-id"
DEADLINE: Final = "aenv-ray.io/deadline"
"""Annotation: seconds since the epoch."""
NONCE: Final = "aenv-ray.io/nonce"
ISOLATION: Final = "aenv-ray.io/isolation"
START_MODE: Final = "aenv-ray.io/start-mode"
ENVIRONMENT: Final = "aenv-ray.io/environment"
LABELS: Final = "aenv-ray.io/labels"


def short(text: str) -> str:
    """Return what may be part of any name or label, one for each text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def node_scope(scope: str) -> str:
    """Return the scope of a node's directory of this engine, which its first use makes."""
    return f"{scope}/kubernetes"


def pod_name(owner_uid: str, instance_id: str) -> str:
    """Return the name of an instance's pod."""
    return f"aenv-{short(f'{owner_uid}/{instance_id}')}"


def labels(owner_uid: str, host_id: str, network: NetworkMode) -> dict[str, str]:
    """Return the labels of a host's pod."""
    return {
        PART_OF: "aenv-ray",
        COMPONENT: SANDBOX,
        NETWORK: network.value,
        OWNER_LABEL: short(owner_uid),
        HOST_LABEL: short(host_id),
    }


def host_selector(owner_uid: str, host_id: str) -> str:
    """Return what selects a host's pods."""
    return f"{COMPONENT}={SANDBOX},{owner_selector(owner_uid)},{HOST_LABEL}={short(host_id)}"


def owner_selector(owner_uid: str) -> str:
    """Return what selects the pods of all hosts in one pod."""
    return f"{OWNER_LABEL}={short(owner_uid)}"
