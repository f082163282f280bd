"""Which network a pod gets, and whether the namespace has a NetworkPolicy that keeps it there.

Policies are the cluster's: the engine labels its pods with the network that they are to have, and
looks whether somebody selects them for what goes out. That a network plugin heeds policies at all
is the cluster's part too.
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
_LOOK_S: Final = 60.0


def network_mode(config: EnvironmentConfig) -> NetworkMode:
    """Return which network an instance gets; the internet, where its project names none.

    Raises:
        ConfigError: It asks for one that pods do not have.
    """
    mode = config.deploy.network or NetworkMode.INTERNET
    if mode.value not in MODES:
        raise ConfigError(
            f"{config.reference}: the kubernetes engine has no network {mode.value!r}",
            hint='set deployConfig.network to "none" or "internet"; what that is decide the '
            "NetworkPolicies of the namespace",
        )
    return mode


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector matches labels; an empty one matches all."""
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


def keeps(policies: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> bool:
    """Whether a policy limits what goes out of a pod with these labels."""
    for policy in policies:
        spec = policy["spec"]
        kinds = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else [])
        if "Egress" in kinds and selects(spec.get("podSelector") or {}, labels):
            return True
    return False


class Policies:
    """The namespace's NetworkPolicies, looked at now and then.

    Args:
        client: Of the API.
        clock: Tells how old what is known is.
    """

    def __init__(self, client: KubernetesClient, clock: Clock | None = None) -> None:
        self._client = client
        self._clock = clock or SystemClock()
        self._known: list[dict[str, Any]] | None = []
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def keep(self, labels: Mapping[str, str]) -> bool | None:
        """Whether one of them limits what goes out; None where they may not be listed."""
        async with self._looking:
            if self._clock.now() - self._looked_at > _LOOK_S:
                try:
                    listed = await self._client.request(Access.LIST_NETWORK_POLICIES)
                    self._known = list(listed["items"])
                except ApiRefused:
                    self._known = None
                self._looked_at = self._clock.now()
            return None if self._known is None else keeps(self._known, labels)
