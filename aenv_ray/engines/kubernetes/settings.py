"""What the operator of a cluster sets for all pods of a host, and the pod that owns them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aenv_ray import units
from aenv_ray.config import Settings
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError, FabricUnavailable

LIFE_S: Final = 86_400.0
GRACE_S: Final = 60.0
END_S: Final = 3
"""Grace period of a pod, from SIGTERM to SIGKILL; process 1 exits at once on a node with time."""
_RAY_CONTAINERS: Final = ("ray-worker", "ray-head")


@dataclass(frozen=True)
class PodSettings:
    """Settings shared by all pods of a host."""

    namespace: str | None = None
    """None: the namespace of the host's own pod."""
    pod_name: str | None = None
    """The host's own pod. None: this machine's host name, which is the pod's name in a pod."""
    image: str | None = None
    """Default image for projects that name none."""
    runtime_class: str | None = None
    """RuntimeClass for projects that name no runtime. None: the cluster's default."""
    carrier_image: str | None = None
    """Image with this package, which supplies a Python to images without a suitable one. None: the
    image of the host's own pod."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: tuple[str, ...] = ()
    priority_class: str | None = None
    user_namespaces: bool = False
    """Whether each pod has a user namespace of its own."""
    storage_class: str | None = None
    """Storage class of claims. None: the cluster's default."""
    requests_share: float = 1.0
    """The share of its limits that a pod requests from a node."""
    memory_bytes: int = 2 << 30
    """Memory limit of each container of a project that names none, with a work directory of the
    default size."""
    disk_bytes: int = 4 << 30
    """Limit of writes to each image's directories, for a project that names none."""
    longest_life_s: float = LIFE_S
    """How far renewals can move a deadline: Kubernetes cannot extend a pod's own deadline."""
    grace_s: float = GRACE_S
    """How long a pod waits for a host that disconnected."""

    @classmethod
    def of(cls, settings: Settings) -> PodSettings:
        """Return the pod settings in this process's settings.

        Raises:
            ConfigError: A setting is malformed.
        """
        return cls(
            namespace=settings.kubernetes_namespace,
            pod_name=settings.pod_name,
            image=settings.kubernetes_image,
            runtime_class=settings.kubernetes_runtime_class,
            carrier_image=settings.kubernetes_carrier_image,
            node_selector=parse_pairs(
                settings.kubernetes_node_selector, "AENV_KUBERNETES_NODE_SELECTOR"
            ),
            pull_secrets=_parse_list(settings.kubernetes_pull_secrets),
            priority_class=settings.kubernetes_priority_class,
            user_namespaces=settings.kubernetes_user_namespaces,
            storage_class=settings.kubernetes_storage_class,
            requests_share=settings.kubernetes_requests,
            memory_bytes=units.parse_memory_bytes(
                settings.kubernetes_memory, what="AENV_KUBERNETES_MEMORY"
            ),
            disk_bytes=units.parse_memory_bytes(
                settings.kubernetes_disk, what="AENV_KUBERNETES_DISK"
            ),
            longest_life_s=units.parse_duration_s(settings.kubernetes_life),
        )


def parse_pairs(text: str, setting: str) -> dict[str, str]:
    """Parse ``a=b,c=d``.

    Raises:
        ConfigError: An entry has no ``=``, or no name before it.
    """
    pairs = {}
    for entry in _parse_list(text):
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"{setting}: invalid entry {entry!r}", hint="write it as label=value,label=value"
            )
        pairs[name] = value
    return pairs


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


@dataclass(frozen=True)
class OwnerPod:
    """The pod that this host runs in. Kubernetes deletes the pods it owns together with it."""

    name: str
    uid: str
    image: str
    """The image of its Ray container."""


async def find_owner(client: KubernetesClient, settings: PodSettings) -> OwnerPod:
    """Return the pod that this process runs in.

    Raises:
        FabricUnavailable: The namespace has no such pod.
        ApiRefused: The API refuses to show it.
    """
    name = settings.pod_name or socket.gethostname()
    try:
        pod = await client.request(Access.GET_POD, name)
    except ApiRefused as exc:
        if exc.status != 404:
            raise
        raise FabricUnavailable(
            f"namespace {client.namespace} has no pod {name}, so nothing would delete the "
            "instances of this host when it ends",
            hint="run Ray in pods, and set POD_NAME and POD_NAMESPACE with the downward API, as "
            "clusters/kuberay does",
        ) from exc
    images = {c["name"]: c["image"] for c in pod["spec"]["containers"]}
    ray = next((n for n in _RAY_CONTAINERS if n in images), next(iter(images)))
    return OwnerPod(name, pod["metadata"]["uid"], images[ray])
