"""What KubeRay 1.7 refuses of a RayCluster, RayJob or RayService that its schema accepts.

The API stores such an object; the operator then reports an event and makes no pod for it. Feature
gates have their defaults. The rules are those of ``controllers/ray/utils/validation.go``, as far as
our objects can break them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

Object = Mapping[str, Any]

_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME: Final = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
_NEW_NAME: Final = 5
"""Characters that the API adds to a generateName."""
_RESOURCE_PARAMS: Final = ("num-cpus", "num-gpus", "memory", "resources")
_TOKENS_SINCE: Final = (2, 52)
_UPGRADES: Final = {
    "RayCluster": {"Recreate", "None"},
    "RayService": {"NewClusterWithIncrementalUpgrade", "NewCluster", "None"},
}


def faults(body: Object) -> list[str]:
    """Return why KubeRay would not act on an object; an empty list for any other kind."""
    rules = {"RayCluster": _ray_cluster, "RayJob": _ray_job, "RayService": _ray_service}
    kind = body["kind"]
    return [*_metadata(body), *rules[kind](body)] if kind in rules else []


def _metadata(body: Object) -> Iterator[str]:
    kind, metadata = body["kind"], body["metadata"]
    name = metadata.get("name") or metadata.get("generateName", "") + "0" * _NEW_NAME
    if len(name) > _LONGEST_NAME[kind]:
        yield f"{kind} name should be no more than {_LONGEST_NAME[kind]} characters"
    if not _DNS_LABEL.fullmatch(name):
        yield f"{kind} name should be a valid DNS1035 label"


def _ray_cluster(body: Object) -> Iterator[str]:
    yield from _upgrade("RayCluster", body["spec"])
    yield from _cluster_spec(body["spec"], body["metadata"].get("annotations") or {})


def _upgrade(kind: str, spec: Object) -> Iterator[str]:
    wanted = (spec.get("upgradeStrategy") or {}).get("type")
    if wanted is not None and wanted not in _UPGRADES[kind]:
        yield f"Spec.UpgradeStrategy.Type value {wanted} is invalid"


def _cluster_spec(spec: Object, annotations: Object) -> Iterator[str]:
    head = spec["headGroupSpec"]
    workers = spec.get("workerGroupSpecs") or []
    options = spec.get("autoscalerOptions") or {}
    is_scaled = bool(spec.get("enableInTreeAutoscaling"))
    for name, group in (("Head", head), *((g["groupName"], g) for g in workers)):
        yield from _group(name, group)
        restart = group["template"]["spec"].get("restartPolicy", "Never")
        if is_scaled and options.get("version") == "v2" and restart != "Never":
            yield f"restartPolicy for {name} should be Never or unset when using autoscaler V2"
    for group in workers:
        yield from _replicas(group, is_scaled)
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds must be non-negative"
    if _has_variable(options, "KUBERAY_GEN_AUTOSCALER_START_CMD"):
        yield "autoscalerOptions.env must not contain KUBERAY_GEN_AUTOSCALER_START_CMD"
    yield from _fault_tolerance(spec, head, annotations)
    if (spec.get("authOptions") or {}).get("mode") == "token":
        version = re.match(r"(\d+)\.(\d+)", spec.get("rayVersion", ""))
        if version is None or (int(version[1]), int(version[2])) < _TOKENS_SINCE:
            yield "authOptions.mode is 'token' but minimum Ray version is 2.52.0"


def _group(name: str, group: Object) -> Iterator[str]:
    params = group.get("rayStartParams") or {}
    if not group["template"]["spec"].get("containers"):
        yield f"{name} group should have at least one container"
    if group.get("resources") and any(params.get(param) for param in _RESOURCE_PARAMS):
        yield f"resource fields should not be set in both rayStartParams and Resources for {name}"
    if "labels" in params:
        yield f"rayStartParams['labels'] is not supported for {name} group"
    if group.get("suspend"):
        yield f"worker group {name} can be suspended only with the RayJobDeletionPolicy feature"


def _replicas(group: Object, is_scaled: bool) -> Iterator[str]:
    name, least, most = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
    if not is_scaled and (least is None or most is None):
        yield f"worker group {name} must set both minReplicas and maxReplicas"
    if (least or 0) < 0 or (most or 0) < 0:
        yield f"worker group {name} has negative replicas"
    if least is not None and most is not None and least > most:
        yield f"worker group {name} has minReplicas {least} greater than maxReplicas {most}"


def _fault_tolerance(spec: Object, head: Object, annotations: Object) -> Iterator[str]:
    containers = head["template"]["spec"].get("containers") or [{}]
    options = spec.get("gcsFaultToleranceOptions")
    params = head.get("rayStartParams") or {}
    if options is None:
        if _has_variable(containers[0], "RAY_REDIS_ADDRESS"):
            yield "RAY_REDIS_ADDRESS is set, but GcsFaultToleranceOptions is not set"
        return
    if annotations.get("ray.io/ft-enabled"):
        yield "ray.io/ft-enabled annotation and GcsFaultToleranceOptions are both set"
    if params.get("redis-password"):
        yield "cannot set `redis-password` when GcsFaultToleranceOptions is enabled"
    for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "REDIS_USERNAME"):
        if _has_variable(containers[0], name):
            yield f"cannot set `{name}` env var when GcsFaultToleranceOptions is enabled"
    if options.get("backend", "redis") == "redis" and options.get("storage"):
        yield "cannot set GcsFaultToleranceOptions.Storage when backend is 'redis'"


def _ray_job(body: Object) -> Iterator[str]:
    spec = body["spec"]
    is_ended, selector = bool(spec.get("shutdownAfterJobFinishes")), spec.get("clusterSelector")
    ttl_s, retries = spec.get("ttlSecondsAfterFinished") or 0, spec.get("backoffLimit") or 0
    mode = spec.get("submissionMode", "K8sJobMode")
    if spec.get("suspend") and (selector or not is_ended):
        yield "this RayJob is not allowed to be suspended"
    if ttl_s < 0:
        yield "TTLSecondsAfterFinished must be a non-negative integer"
    if ttl_s > 0 and not is_ended:
        yield (
            "a RayJob with shutdownAfterJobFinishes set to false cannot have "
            "TTLSecondsAfterFinished"
        )
    if not selector and not spec.get("rayClusterSpec"):
        yield "one of RayClusterSpec or ClusterSelector must be set"
    if selector and not selector.get("ray.io/cluster"):
        yield "cluster name in ClusterSelector should not be empty"
    if selector and (mode == "SidecarMode" or retries > 0):
        yield "SidecarMode and BackoffLimit are incompatible with ClusterSelector mode"
    if mode == "SidecarMode" and spec.get("submitterPodTemplate"):
        yield "SidecarMode doesn't support SubmitterPodTemplate"
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field, 1) <= 0:
            yield f"{field} must be a positive integer"
    if retries < 0:
        yield "backoffLimit must be a positive integer"
    if spec.get("rayClusterSpec"):
        yield from _cluster_spec(spec["rayClusterSpec"], body["metadata"].get("annotations") or {})


def _ray_service(body: Object) -> Iterator[str]:
    spec = body["spec"]
    cluster = spec["rayClusterConfig"]
    yield from _upgrade("RayService", spec)
    yield from _cluster_spec(cluster, body["metadata"].get("annotations") or {})
    if (cluster["headGroupSpec"].get("headService") or {}).get("metadata", {}).get("name"):
        yield "headService.metadata.name should not be set"
    if (spec.get("rayClusterDeletionDelaySeconds") or 0) < 0:
        yield "Spec.RayClusterDeletionDelaySeconds should be a non-negative integer"


def _has_variable(container: Object, name: str) -> bool:
    return any(variable["name"] == name for variable in container.get("env") or ())
