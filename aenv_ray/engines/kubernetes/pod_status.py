"""What a pod's status means: whether it is reachable, why it does not start, why it ended.

Pure functions. Texts are for people, exception types for programs.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from aenv_ray.engines.base import EndCause, start_failed
from aenv_ray.engines.images.registry import pull_trouble
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InsideCause,
    SandboxStartFailed,
    inside_cause,
)
from aenv_ray.runtime.container.pod import ENDED_BY_SIGTERM, HOST_GONE, TTL_PASSED

Pod = Mapping[str, Any]

REMOVED: Final = "its pod was deleted by someone other than its host"
SIDECAR: Final = "its sidecar: "
_NEVER: Final = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_BROKEN: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
)
_NO_SUCH_IMAGE: Final = ("not found", "denied", "unauthorized", "no such host", "invalid reference")
_QUOTA: Final = "exceeded quota"
_QUOTA_RETRY_S: Final = 10.0
_KILLED_EXIT: Final = 137
_CLOCK_SKEW: Final = timedelta(seconds=10)
"""How far the clock of a node may be behind that of the API."""
_OWN_LIMITS: Final = (
    "pod ephemeral local storage usage exceeds",
    "exceeded its local ephemeral storage limit",
    "usage of emptydir volume",
)
"""How a kubelet says that a pod is evicted for its own limits, and not for a lack of its node."""
_OF_IMAGE: Final = (names.MAIN_CONTAINER, names.UNPACKER_CONTAINER)
"""The containers that run the Python of the instance's image."""
_DISRUPTIONS: Final = {
    "DeletionByTaintManager": "its node no longer answers, or no longer accepts it",
    "DeletionByPodGC": "its node is gone",
    "EvictionByEvictionAPI": "it was evicted through the API, for example to drain its node",
    "PreemptionByScheduler": "a pod of higher priority took its place",
    "PreemptionByKubeScheduler": "a pod of higher priority took its place",
    "TerminationByKubelet": "its node ended it",
}


class UnsuitableImage(Exception):
    """The image lacks something that the runtime needs; the message says what."""


def is_over(pod: Pod) -> bool:
    """Return whether a pod has ended, or is ending."""
    return (
        pod["status"].get("phase") in ("Succeeded", "Failed")
        or "deletionTimestamp" in pod["metadata"]
        or any("terminated" in status.get("state", {}) for status in _statuses(pod))
    )


def created_at(pod: Pod) -> float:
    """Return when a pod was created, in seconds since the epoch."""
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def address(pod: Pod) -> str | None:
    """Return the address of a pod; None before all its containers run."""
    statuses = list(_statuses(pod))
    if len(statuses) < len(lasting(pod)):
        return None
    if not all("running" in status.get("state", {}) for status in statuses):
        return None
    return str(pod["status"].get("podIP") or "") or None


def unscheduled(pod: Pod) -> str | None:
    """Return why the scheduler finds no node for a pod; None if it has one or has not tried."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "no node is suitable")
    return None


def no_room(instance_id: str, why: str, waited_s: float) -> CapacityExceeded:
    """Return the error for a pod that was not scheduled in time."""
    return CapacityExceeded(
        f"no node had room for {instance_id} within {waited_s:g} s: {why}",
        retry_after_s=_QUOTA_RETRY_S,
        hint="wait for other instances to end, add nodes, or lower deployConfig.cpu and "
        "deployConfig.memory",
    )


def start_failure(pod: Pod, instance_id: str) -> AenvError | UnsuitableImage | None:
    """Return the error that prevents a pod from starting; None while it may still start."""
    rows = ("initContainerStatuses", "containerStatuses")
    for status in (status for row in rows for status in pod["status"].get(row) or ()):
        state = status.get("state", {})
        image, name = status.get("image", ""), status["name"]
        waiting = state.get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _NEVER or (
            reason == "ErrImagePull" and any(word in message.lower() for word in _NO_SUCH_IMAGE)
        ):
            return start_failed(
                instance_id, f"image {image} cannot be pulled ({reason}): "
                f"{pull_trouble(image, message)}",
                "check its name and tag; for a private registry, set AENV_KUBERNETES_PULL_SECRETS",
            )  # fmt: skip
        ended = state.get("terminated") or {}
        broken = ended if ended.get("reason") in ("StartError", "ContainerCannotRun") else waiting
        if name in _OF_IMAGE and _lacks_python(broken.get("message", "")):
            return UnsuitableImage(f"image {image} has no python3 that runs")
        if reason in _BROKEN or broken is ended:
            message = broken.get("message", "")
            why = f"container {name}: {broken.get('reason')}: {message}"
            return start_failed(instance_id, why, _way_out(message))
        if name == names.UNPACKER_CONTAINER and ended.get("exitCode"):
            why = f"exit code {ended['exitCode']} {ended.get('message', '')}"
            return start_failed(instance_id, f"its files cannot be unpacked: {why}")
        if name == names.CARRIER_CONTAINER and ended.get("exitCode"):
            why = f"exit code {ended['exitCode']} {ended.get('message', '')}"
            return start_failed(
                instance_id, f"image {image} supplies no runtime: {why}",
                "set AENV_KUBERNETES_CARRIER_IMAGE to an image with this package",
            )  # fmt: skip
    return None


def _lacks_python(message: str) -> bool:
    words = message.lower()  # each OCI runtime words it differently
    return "python3" in words and ("not found" in words or "no such file" in words)


def _way_out(message: str) -> str | None:
    if "permission denied" in message.lower():
        return (
            "the container's user may not run that: set another user in "
            'deployConfig.container.user ("1000:1000"), or make the image readable for everyone'
        )
    return None


def end_cause(pod: Pod) -> EndCause:
    """Return why a pod ended, or is ending."""
    status = pod["status"]
    if status.get("reason") == "DeadlineExceeded":
        return EndCause(TTL_PASSED)
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            words = _DISRUPTIONS.get(condition.get("reason", ""), condition.get("reason", ""))
            detail = condition.get("message")
            return EndCause(f"{words} ({detail})" if detail else words)
    if status.get("reason") == "Evicted":
        message = str(status.get("message", "no reason given"))
        is_own = any(words in message.lower() for words in _OWN_LIMITS)
        return EndCause(f"its node evicted it: {message}", InsideCause.DISK if is_own else None)
    if status.get("reason") in ("NodeLost", "NodeShutdown", "Terminated", "Shutdown", "Preempting"):
        return EndCause(f"its node was lost: {status.get('message') or status['reason']}")
    for container in _statuses(pod):
        ended = container.get("state", {}).get("terminated")
        if ended is not None:
            cause = _container_cause(pod, container["name"], ended)
            return cause if container["name"] == names.MAIN_CONTAINER else of_sidecar(cause)
    return EndCause(str(status.get("message") or REMOVED))


def unexplained_end(pod: Pod) -> EndCause | None:
    """Return the cause if process 1 of a pod ended by a SIGTERM for which the API shows no reason.

    A process inside can send one that looks as if it came from outside, so such an end counts as
    one from inside. The reason may come later than the end of a container: a kubelet writes it when
    all containers have ended, and that of a node that is gone comes with the pod's deletion. A
    deletion that somebody asked for after the end is no reason.
    """
    return None if _is_explained(pod) else sent_inside(end_cause(pod))


def sent_inside(cause: EndCause) -> EndCause | None:
    """Return a cause as one from inside if it is a SIGTERM, else None."""
    is_sigterm = cause.text.removeprefix(SIDECAR).startswith(ENDED_BY_SIGTERM)
    return replace(cause, inside=InsideCause.SIGNAL) if is_sigterm else None


def _is_explained(pod: Pod) -> bool:
    """Return whether the API shows that something outside of a pod ended it."""
    status = pod["status"]
    return (
        _is_end_of_deletion(pod)
        or bool(status.get("reason"))
        or any(
            condition["type"] == "DisruptionTarget" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        )
    )


def _is_end_of_deletion(pod: Pod) -> bool:
    """Return whether a pod was being deleted when its first container ended, or has none that has.

    Without a request for a deletion at that time, an agent could end its pod, and have the janitor
    of another host, or a cron job that tidies up, supply the reason.
    """
    metadata = pod["metadata"]
    if "deletionTimestamp" not in metadata:
        return False
    grace = timedelta(seconds=int(metadata.get("deletionGracePeriodSeconds") or 0))
    requested = datetime.fromisoformat(metadata["deletionTimestamp"]) - grace
    ended = [
        datetime.fromisoformat(state["finishedAt"])
        for status in _statuses(pod)
        if (state := status.get("state", {}).get("terminated")) and state.get("finishedAt")
    ]
    return not ended or requested <= min(ended) + _CLOCK_SKEW


def _container_cause(pod: Pod, name: str, ended: Mapping[str, Any]) -> EndCause:
    code = int(ended.get("exitCode", 0))
    if ended.get("reason") == "OOMKilled" and code == _KILLED_EXIT:
        # Before the message: process 1 had no time to write it, but other processes could.
        limits = next(c for c in pod["spec"]["containers"] if c["name"] == name)
        limit = limits.get("resources", {}).get("limits", {}).get("memory", "")
        if not limit:
            return EndCause("it ran out of memory and was killed (the node ran out)")
        bound = f"limit {_in_mebibytes(limit)}"
        return EndCause(f"it ran out of memory and was killed ({bound})", InsideCause.MEMORY)
    if code == _KILLED_EXIT:  # so that process 1 has left no message, but other processes could
        return EndCause("its main process was killed by SIGKILL")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        left = json.loads(ended.get("message") or "")
        cause = EndCause(str(left["cause"]), inside_cause(left.get("inside")))
        return explained(cause, base64.b64decode(left["log"]).decode(errors="replace"))
    return EndCause(f"its main process exited with code {code}", InsideCause.EXIT)


def _in_mebibytes(quantity: str) -> str:
    """Return a quantity in words; the API writes 524288000 as ``524288k``, for example."""
    from kubernetes.utils.quantity import parse_quantity

    try:
        return f"{int(parse_quantity(quantity)) >> 20} MiB"
    except ValueError:
        return quantity


def explained(cause: EndCause, log: str) -> EndCause:
    """Return a cause with the end of the log, unless the cause explains itself."""
    return cause if cause.text in (TTL_PASSED, HOST_GONE) else cause.with_log(log)


def of_sidecar(cause: EndCause) -> EndCause:
    """Return a cause that names the sidecar, unless both containers share it."""
    is_shared = cause.text in (TTL_PASSED, HOST_GONE)
    return cause if is_shared else replace(cause, text=f"{SIDECAR}{cause}")


def lasting(pod: Pod) -> list[str]:
    """Return the names of the containers that run as long as a pod: all but the unpacker."""
    found = [container["name"] for container in pod["spec"]["containers"]]
    return [name for name in found if name != names.UNPACKER_CONTAINER]


def _statuses(pod: Pod) -> Iterator[Mapping[str, Any]]:
    """Yield the statuses of the containers that run as long as a pod."""
    for status in pod["status"].get("containerStatuses") or ():
        if status["name"] != names.UNPACKER_CONTAINER:
            yield status


# --- refusals of the API --------------------------------------------------------------------------


@contextlib.contextmanager
def api_errors(client: KubernetesClient) -> Iterator[None]:
    """Raise the API's refusals within the block as our errors."""
    try:
        yield
    except ApiRefused as exc:
        raise error_of(exc, client.namespace) from exc


def error_of(refused: ApiRefused, namespace: str, instance_id: str | None = None) -> AenvError:
    """Return the error for a refusal of the API."""
    permission, message = refused.access.value, refused.message
    who = f"{instance_id} did not start: " if instance_id else ""
    if _QUOTA in message:
        return CapacityExceeded(
            f"{who}namespace {namespace} has no room: {message}",
            retry_after_s=_QUOTA_RETRY_S,
            hint="wait for other instances to end, or ask for a higher ResourceQuota",
        )
    if refused.status in (401, 403) and ("cannot" in message or refused.status == 401):
        of = f" of {permission.group}" if permission.group else ""
        return FabricUnavailable(
            f"{who}the service account may not {permission.verb} {permission.resource} in "
            f"namespace {namespace}: {message}",
            hint=f"grant it in a Role: verb {permission.verb} on {permission.resource}{of}; "
            "`aenv cluster doctor` lists all missing permissions",
        )
    if refused.status == 403 and refused.access is Access.CREATE_POD:
        return ConfigError(
            f"{who}namespace {namespace} refuses its pod: {message}",
            hint="change the project's deployConfig, or the Pod Security level, LimitRange or "
            "RuntimeClass of the namespace",
        )
    if refused.status in (400, 404, 409, 422) and instance_id:
        return SandboxStartFailed(
            f"{who}{message}",
            instance_id=instance_id,
            hint="correct deployConfig in config.json, or what the message names in the namespace",
        )
    return FabricUnavailable(
        f"{who}the Kubernetes API refuses to {permission.verb} {permission.resource}: {message}",
        hint="try again; `aenv cluster doctor` checks the cluster",
    )
