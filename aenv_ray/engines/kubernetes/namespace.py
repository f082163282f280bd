"""Where a host's pods are made: namespace, owner, and what the cluster's operator wants of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aenv_ray import units
from aenv_ray.config import Settings
from aenv_ray.errors import ConfigError

LIFE_S: Final = 86_400.0
GRACE_S: Final = 60.0


@dataclass(frozen=True)
class Owner:
    """The pod that this host runs in; Kubernetes ends what it owns with it."""

    name: str
    uid: str


@dataclass(frozen=True)
class Place:
    """What all pods of a host share, from settings."""

    namespace: str | None = None
    """None: that of the host's own pod."""
    pod_name: str | None = None
    """Of the host's own pod. None: this machine's name, which is that in a pod."""
    image: str | None = None
    """Of projects that name none."""
    runtime_class: str | None = None
    """Of projects that name no runtime. None: the cluster's default."""
    carrier_image: str | None = None
    """Image with this package, for those without a fitting Python. None: the host's own."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    storage_class: str | None = None
    """Of claims. None: the cluster's default."""
    requests_share: float = 1.0
    """Of its limits in cores and memory, for which a pod asks a node."""
    longest_life_s: float = LIFE_S
    """How far renewals can move a deadline: Kubernetes lets nobody extend a pod's own."""
    grace_s: float = GRACE_S
    """How long pods wait for a host that went away."""


def place_of(settings: Settings) -> Place:
    """Return the place that an operator set.

    Raises:
        ConfigError: A setting is none.
    """
    return Place(
        namespace=settings.kubernetes_namespace,
        pod_name=settings.pod_name,
        image=settings.kubernetes_image,
        runtime_class=settings.kubernetes_runtime_class,
        carrier_image=settings.kubernetes_carrier_image,
        node_selector=parse_pairs(
            settings.kubernetes_node_selector, "AENV_KUBERNETES_NODE_SELECTOR"
        ),
        pull_secrets=parse_names(settings.kubernetes_pull_secrets),
        priority_class=settings.kubernetes_priority_class,
        storage_class=settings.kubernetes_storage_class,
        requests_share=settings.kubernetes_requests,
        longest_life_s=units.parse_duration_s(settings.kubernetes_life),
    )


def parse_pairs(text: str, what: str) -> dict[str, str]:
    """Return ``a=b,c=d`` as a mapping.

    Args:
        text: "" for none.
        what: Setting that it is, for messages.

    Raises:
        ConfigError: An entry is no pair.
    """
    pairs = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ConfigError(f"{what}: {entry!r} is not name=value")
        pairs[name] = value
    return pairs


def parse_names(text: str) -> tuple[str, ...]:
    """Return ``a,b`` as names."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))
