"""Checks the values and settings of a cluster before anything is applied.

The API accepts any text as a variable or as a number of slots. A wrong one would only be noticed by
the head or a worker, which then restarts for ever.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aenv_ray import policy
from aenv_ray.cluster.objects import Document
from aenv_ray.config import parse_settings
from aenv_ray.engines.kubernetes.settings import PodSettings
from aenv_ray.errors import ConfigError

_SLOTS: Final = (r"\d{1,6}", "a whole number of instances, 0 or more")
_WORKERS: Final = (r"\d{1,6}", "a whole number of workers, 0 or more")
_GROUPS: Final = ("workers", "processWorkers", "dockerWorkers")
_FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "namespace": (
        r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        "up to 63 lowercase letters, digits and hyphens",
    ),
    "image": (r"\S+", "REGISTRY/NAME:TAG"),
    "imagePullPolicy": ("(Always|IfNotPresent|Never)?", "Always, IfNotPresent or Never"),
    "rayVersion": (r"\d+\.\d+\.\d+\S*", "the version of Ray in the image, such as 2.60.0"),
    "podSecurity": ("privileged|baseline|restricted", "privileged, baseline or restricted"),
    "gateway.replicas": (r"[1-9]\d{0,3}", "a whole number of processes, 1 or more"),
    "gateway.serviceType": (
        "(ClusterIP|LoadBalancer|NodePort)?",
        "ClusterIP, LoadBalancer or NodePort",
    ),
    "workers.idleTimeoutSeconds": (r"\d+", "a whole number of seconds, 0 or more"),
    "workers.drainSeconds": (r"\d+", "a whole number of seconds, 0 or more"),
    **{f"{group}.envSlots": _SLOTS for group in _GROUPS},
    **{f"{group}.minReplicas": _WORKERS for group in _GROUPS},
    **{f"{group}.maxReplicas": _WORKERS for group in _GROUPS},
    "redis.replicas": ("[01]", "1, or 0 for your own Redis"),
}
"""Values that are not settings of ours: a pattern for each, and what it means."""
_REFERENCE: Final = re.compile(r"(?<!\$)\$\((\w+)\)")


def check_values(values: Mapping[str, Any]) -> None:
    """Check the values of an overlay that no process of ours checks when it starts.

    Raises:
        ConfigError: A value is malformed.
    """
    for name, (pattern, words) in _FORMATS.items():
        group, _, key = name.rpartition(".")
        place = values.get(group) or {} if group else values
        if key in place and not re.fullmatch(pattern, str(place[key])):
            raise ConfigError(
                f"value {name} is {place[key]!r}: expected {words}",
                hint="correct it in values.yaml or in --set",
            )
    for group in _GROUPS:
        bounds = values.get(group) or {}
        least, most = bounds.get("minReplicas"), bounds.get("maxReplicas")
        if None not in {least, most} and int(str(least)) > int(str(most)):
            raise ConfigError(
                f"values {group}.minReplicas and .maxReplicas are {least} and {most}: expected "
                "minReplicas <= maxReplicas",
                hint="correct one of them",
            )


def check_settings(documents: Sequence[Document]) -> None:
    """Check the ``AENV_…`` variables of head and workers as these do when they start.

    Raises:
        ConfigError: A variable is malformed.
    """
    for document in documents:
        if document.get("kind") != "RayCluster":
            continue
        spec = document.get("spec") or {}
        groups = [spec.get("headGroupSpec") or {}, *(spec.get("workerGroupSpecs") or ())]
        for group in groups:
            pods = (group.get("template") or {}).get("spec") or {}
            for container in pods.get("containers") or ():
                try:
                    _check(_variables(container))
                except ConfigError as exc:
                    where = f"worker group {group['groupName']}" if "groupName" in group else "head"
                    raise ConfigError(
                        f"the {where} would not start: {exc.message}",
                        hint="correct the value in values.yaml or in --set, or the variable in "
                        f"your manifests: container {container.get('name')}",
                    ) from None


def _check(variables: Mapping[str, str]) -> None:
    settings = parse_settings(variables)
    _ = settings.joining_engines, settings.cache_limits
    PodSettings.of(settings)
    policy.policy_of(settings, behind_gateway=True)


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Return a container's variables of ours; those with values from elsewhere are left out.

    ``$(NAME)`` stands for a variable that the list has before, as Kubernetes reads it.
    """
    before: dict[str, str | None] = {}  # None: the value comes from elsewhere
    for entry in container.get("env") or ():
        text = None if entry.get("valueFrom") else str(entry.get("value") or "")
        if text is not None:
            used = [match[1] for match in _REFERENCE.finditer(text) if match[1] in before]
            if any(before[name] is None for name in used):
                text = None
            else:
                text = _REFERENCE.sub(lambda match: before.get(match[1]) or match[0], text)
        before[str(entry.get("name"))] = text
    return {name: text for name, text in before.items() if text and name.startswith("AENV_")}
