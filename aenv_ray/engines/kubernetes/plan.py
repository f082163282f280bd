"""What a pod needs beyond its spec: owner, image, network, storage, preferred nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import SandboxSpec, check_os
from aenv_ray.engines.images.node_images import check_image, check_names, reference_of
from aenv_ray.engines.images.serving import Serving, has_code, no_tools_reason, sidecar_image
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.settings import OwnerPod, PodSettings, find_owner
from aenv_ray.engines.kubernetes.volume_claims import VolumeClaims
from aenv_ray.errors import ConfigError, FabricUnavailable, PolicyRefused
from aenv_ray.ids import HostId
from aenv_ray.policy import Policy
from aenv_ray.project.config import EnvironmentConfig, NetworkMode

logger = logging.getLogger(__name__)

_NODES_PER_IMAGE: Final = 8
_MOST_IMAGES: Final = 1024
MODES: Final = frozenset({"none", "internet"})
_REFRESH_S: Final = 60.0


@dataclass(frozen=True)
class PodPlan:
    """What the manifest of a pod needs in addition to its spec."""

    name: str
    host_id: str
    owner: OwnerPod
    settings: PodSettings
    nonce: str
    """The pod's secrets derive from it and from a key that only the owner's hosts have."""
    secret_digest: str
    """Digest of the secret that opens the first connection."""
    image: str
    serving: Serving = Serving.RUNTIME
    no_tools_reason: str = ""
    """With ``commands``: why there are no tools."""
    sidecar_image: str = ""
    carrier_image: str = ""
    """Image that supplies a Python; "" if no container needs one."""
    network: NetworkMode = NetworkMode.INTERNET
    is_egress_limited: bool | None = False
    """Whether a NetworkPolicy of the namespace limits the pod's egress. None: unknown."""
    nodes: Sequence[str] = ()
    """Nodes that have the image."""
    refuses_volumes: bool = False
    """Whether an image that brings volumes is refused, as where isolation is required."""

    @property
    def needs_carried_python(self) -> bool:
        """Whether the main container runs on the carrier image's Python."""
        return self.serving is not Serving.RUNTIME


class PodPlanner:
    """Plans the pods of a host, with the settings of the operator."""

    def __init__(
        self,
        client: KubernetesClient,
        settings: PodSettings,
        host_id: HostId,
        policy: Callable[[], Policy],
    ) -> None:
        self._client = client
        self._settings = settings
        self._host_id = host_id
        self._policy = policy
        self._policies = _NetworkPolicies(client)
        self.claims = VolumeClaims(client, settings.storage_class)
        self._image_problems: BoundedCache[str, str] = BoundedCache(_MOST_IMAGES)
        self._nodes: BoundedCache[str, deque[str]] = BoundedCache(_MOST_IMAGES)
        self._owner: OwnerPod | None = None

    @property
    def owner(self) -> OwnerPod:
        """The pod that this host runs in.

        Raises:
            FabricUnavailable: `connect` has not been called.
        """
        if self._owner is None:
            raise FabricUnavailable("the kubernetes engine is not connected")
        return self._owner

    async def connect(self) -> OwnerPod:
        """Find the pod that this host runs in.

        Raises:
            FabricUnavailable: The namespace has no such pod.
            ApiRefused: The API refuses to show it.
        """
        self._owner = await find_owner(self._client, self._settings)
        return self._owner

    def add_node(self, image: str, node: str) -> None:
        """Record that a node has an image, so that further pods of the image prefer it."""
        nodes = self._nodes.get(image) or deque(maxlen=_NODES_PER_IMAGE)
        if node and node not in nodes:
            nodes.append(node)
            self._nodes.put(image, nodes)

    async def plan(
        self, spec: SandboxSpec, name: str, nonce: str, secret_digest: str, image_problem: str
    ) -> PodPlan:
        """Return the plan of a pod.

        Raises:
            ConfigError: The project asks for something that pods do not support.
            PolicyRefused: The policy does not allow its image, or requires isolation and nothing
                limits the pod's network.
            FabricUnavailable: The API does not answer, or the instance's storage is gone.
            ApiRefused: The API refuses a claim.
        """
        deploy = spec.config.deploy
        check_os(spec.config, "linux", "the cluster")
        mode = network_mode(spec.config)
        image = reference_of(spec.config, self._settings.image, needs_registry=True)
        if image != self._settings.image:
            check_image(self._policy(), image, spec.config.reference)
            check_names(self._policy(), image, (), spec.config.reference)
        is_code_there = await asyncio.to_thread(has_code, spec.project_dir)
        if image_problem:
            self._image_problems.put(image, image_problem)
        problem = self._image_problems.get(image) or ""
        asked = Serving(deploy.container.door) if deploy.container.door else None
        if asked is Serving.RUNTIME and problem:
            raise ConfigError(problem, hint="base the image on Python 3.11 or newer")
        serving = asked or (Serving.COMMANDS if problem else Serving.RUNTIME)
        reason = ""
        if serving is Serving.COMMANDS:
            reason = no_tools_reason(problem, has_code=is_code_there)
            if is_code_there:
                extra = logs.of_instance(spec.instance_id)
                logger.warning("%s has no tools: %s", spec.instance_id, reason, extra=extra)
        sidecar = ""
        if deploy.is_dual:
            sidecar = sidecar_image(spec.config.reference, deploy, spec.datasource)
            check_image(self._policy(), sidecar, spec.config.reference)
            check_names(self._policy(), sidecar, (), spec.config.reference)
        labels = names.labels(self.owner.uid, self._host_id, mode)
        is_egress_limited = await self._policies.limit_egress(labels)
        if not is_egress_limited and self._policy().isolation == "required":
            raise self._open_network(mode, is_known=is_egress_limited is not None)
        if spec.storage is not None:
            await self.claims.ensure(spec.storage)
        carrier = self._settings.carrier_image or self.owner.image
        return PodPlan(
            name=name,
            host_id=self._host_id,
            owner=self.owner,
            settings=self._settings,
            nonce=nonce,
            secret_digest=secret_digest,
            image=image,
            serving=serving,
            no_tools_reason=reason,
            sidecar_image=sidecar,
            carrier_image=carrier if sidecar or serving is not Serving.RUNTIME else "",
            network=mode,
            is_egress_limited=is_egress_limited,
            nodes=tuple(self._nodes.get(image) or ()),
            refuses_volumes=self._policy().isolation == "required",
        )

    def _open_network(self, mode: NetworkMode, *, is_known: bool) -> PolicyRefused:
        label, namespace = f"{names.NETWORK}={mode.value}", self._client.namespace
        if is_known:
            return PolicyRefused(
                f"no NetworkPolicy of namespace {namespace} limits what a pod with label {label} "
                "reaches, Ray included, and this cluster requires isolation",
                hint="apply clusters/kuberay/base/network-policies.yaml, or have the operator set "
                "AENV_ISOLATION=auto",
            )
        return PolicyRefused(
            f"this host may not list the NetworkPolicies of namespace {namespace}, so it is "
            "unknown whether a sandbox can reach Ray, and this cluster requires isolation",
            hint="grant its service account `list networkpolicies`, as clusters/kuberay does, or "
            "have the operator set AENV_ISOLATION=auto",
        )


# --- the network ----------------------------------------------------------------------------------
#
# The engine labels its pods with their network and checks whether a policy with egress rules
# selects that label. Policies, and a network plugin that enforces them, are the operator's part.


def network_mode(config: EnvironmentConfig) -> NetworkMode:
    """Return the network of an instance: the project's, or the internet by default.

    Raises:
        ConfigError: The project asks for a network that pods do not support.
    """
    mode = config.deploy.network or NetworkMode.INTERNET
    if mode.value not in MODES:
        raise ConfigError(
            f"{config.reference}: the kubernetes engine does not support network {mode.value!r}",
            hint='set deployConfig.network to "none" or "internet"; the NetworkPolicies of the '
            "namespace define what each of them reaches",
        )
    return mode


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector matches labels; an empty selector matches everything."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or ():
        key, values = expression["key"], expression.get("values") or ()
        holds = {
            "In": key in labels and labels[key] in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[expression["operator"]]
        if not holds:
            return False
    return True


def limits_egress(policies: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> bool:
    """Return whether a policy limits the egress of a pod with these labels."""
    for policy in policies:
        spec = policy["spec"]
        kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else [])
        if "Egress" in kinds and selects(spec.get("podSelector") or {}, labels):
            return True
    return False


class _NetworkPolicies:
    """The namespace's NetworkPolicies, cached for a minute."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._clock = SystemClock()
        self._policies: list[dict[str, Any]] | None = []
        self._listed_at = float("-inf")
        self._lock = asyncio.Lock()

    async def limit_egress(self, labels: Mapping[str, str]) -> bool | None:
        """Return whether a policy limits the egress of a pod; None if policies cannot be listed."""
        async with self._lock:
            if self._clock.now() - self._listed_at > _REFRESH_S:
                try:
                    listed = await self._client.request(Access.LIST_NETWORK_POLICIES)
                    self._policies = list(listed["items"])
                except ApiRefused:
                    self._policies = None
                self._listed_at = self._clock.now()
            return None if self._policies is None else limits_egress(self._policies, labels)
