"""The network of a pod, and whether a NetworkPolicy of the namespace enforces it.

The engine labels its pods with their network and checks whether a policy with egress rules selects
that label. Policies, and a network plugin that enforces them, are the operator's part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError
from aenv_ray.project.config import EnvironmentConfig, NetworkMode

MODES: Final = frozenset({"none", "internet"})
_REFRESH_S: Final = 60.0


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


class NetworkPolicies:
    """The namespace's NetworkPolicies, cached for a minute.

    Args:
        client: Of the API.
        clock: For the age of the cache.
    """

    def __init__(self, client: KubernetesClient, clock: Clock | None = None) -> None:
        self._client = client
        self._clock = clock or SystemClock()
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
