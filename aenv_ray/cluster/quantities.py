"""Kubernetes quantities, such as ``500m`` and ``2Gi``, and the requests of pods."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aenv_ray.errors import ConfigError

_QUANTITY: Final = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")
_FACTORS: Final = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def parse(text: object) -> float:
    """Return a quantity in its base unit: cores, bytes or a count.

    Raises:
        ConfigError: It is malformed.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in _FACTORS:
        raise ConfigError(
            f"invalid quantity {text!r}", hint='write it as in Kubernetes: "500m", "2Gi"'
        )
    return float(match[1]) * _FACTORS[match[2]]


def shown(resource: str, amount: float) -> str:
    """Format a quantity for people."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.1f}Gi"
    return f"{amount:g}"


def requests_of(pod_spec: Mapping[str, Any]) -> Counter[str]:
    """Return the resources that a node must have free for a pod."""
    total: Counter[str] = Counter()
    for container in pod_spec.get("containers") or []:
        total.update(_requests(container))
    before: Counter[str] = Counter()
    for container in pod_spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":  # a sidecar runs beside the others
            total.update(_requests(container))
        else:
            before |= _requests(container)
    return total | before


def _requests(container: Mapping[str, Any]) -> Counter[str]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return Counter({name: parse(amount) for name, amount in wanted.items()})


def total(counts: Iterable[tuple[Counter[str], int]]) -> Counter[str]:
    """Return the sum of requests, each multiplied by its number of pods."""
    result: Counter[str] = Counter()
    for requests, number in counts:
        for name, amount in requests.items():
            result[name] += amount * number
    return result
