"""What a pod is made from: a spec and facts of the place in, the API's JSON out.

Nothing here speaks with anybody. No variable of an instance, and no secret, is in a pod's spec,
where everybody who may list pods reads it: those go to the pod itself (`kubernetes_boot`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.images import node_python as docker_python
from aenv_ray.engines.images.serving import SHARED, Serving
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.namespace import Owner, Place
from aenv_ray.errors import ConfigError
from aenv_ray.models import Isolation
from aenv_ray.project.config import DeployConfig, NetworkMode
from aenv_ray.project.storage import shown_size
from aenv_ray.runtime.container.process_one import HOME, MAX_FILES, PROJECT
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES, NOBODY, WORK

PORT: Final = 8070
"""Where process 1 listens; the second container's is the next but one."""
SECOND_PORT: Final = 8072
INSTANCE: Final = "instance"
SECOND: Final = "second"
CARRIER: Final = "carrier"
_CARRIED: Final = f"{HOME}-carried"
_HOME_BYTES: Final = 512 * 1024**2
_SHARED_MEMORY_BYTES: Final = 64 * 1024**2
_AWAY_S: Final = 30
"""How long a pod stays on a node that does not answer; the default is five minutes."""
_PREFERRED_NODES: Final = 8
_STAGE: Final = Path(__file__).with_name("stage.py")
_NO_DIRECTORY: Final = "import sys\nsys.path = [path for path in sys.path if path]\n"
"""Nothing is imported from where it starts. The option for that, -P, is unknown before Python 3.11,
and an older one is to live long enough to tell its version."""
_USER: Final = re.compile(r"^(\d+|root)(?::(\d+|root))?$")


@dataclass(frozen=True)
class Surroundings:
    """What a pod gets that its spec does not say."""

    name: str
    host_id: str
    owner: Owner
    place: Place
    nonce: str
    """From which its secrets are made, with what only hosts of the owner have."""
    secret_digest: str
    """Of what opens its first connection."""
    image: str
    serving: Serving = Serving.RUNTIME
    absence: str = ""
    second_image: str = ""
    carrier_image: str = ""
    """With this package, for what an image lacks; "" where it lacks nothing."""
    network: NetworkMode = NetworkMode.INTERNET
    is_network_kept: bool | None = False
    """A NetworkPolicy of the namespace selects the pod for what goes out. None: not known."""
    nodes: Sequence[str] = ()
    """That have the image."""

    @property
    def is_carried(self) -> bool:
        """Whether the first container runs on a Python that is brought along."""
        return self.serving is not Serving.RUNTIME


def pod_body(spec: SandboxSpec, around: Surroundings, now: float) -> dict[str, Any]:
    """Return what the API makes an instance's pod from.

    Raises:
        ConfigError: The project asks for what no pod has.
    """
    deploy = spec.config.deploy
    place = around.place
    containers = [_container(spec, around, INSTANCE)]
    if around.second_image:
        containers.append(_container(spec, around, SECOND))
    life_s = max(place.longest_life_s, spec.deadline - now) + place.grace_s
    pod: dict[str, Any] = {
        "activeDeadlineSeconds": int(life_s),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": re.sub(r"[^a-z0-9-]", "-", spec.instance_id.lower())[:63].strip("-") or "pod",
        "securityContext": _pod_security(spec),
        "containers": containers,
        "volumes": [*_volumes(around, deploy), *_claims(spec)],
        "tolerations": [
            {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": _AWAY_S}
            for word in ("not-ready", "unreachable")
        ],
    }  # fmt: skip
    if around.carrier_image:
        pod["initContainers"] = [_carrier(around, deploy)]
    runtime = deploy.container.runtime or place.runtime_class
    if runtime:
        pod["runtimeClassName"] = runtime
    if place.node_selector:
        pod["nodeSelector"] = dict(place.node_selector)
    if place.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in place.pull_secrets]
    if place.priority_class:
        pod["priorityClassName"] = place.priority_class
    if around.nodes:
        pod["affinity"] = _affinity(around.nodes)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": around.name,
            "labels": names.labels(around.owner.uid, around.host_id, around.network),
            "annotations": _annotations(spec, around),
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": around.owner.name,
                 "uid": around.owner.uid, "controller": False, "blockOwnerDeletion": False}
            ],
        },
        "spec": pod,
    }  # fmt: skip


def _annotations(spec: SandboxSpec, around: Surroundings) -> dict[str, str]:
    return {
        names.INSTANCE: spec.instance_id,
        names.HOST: around.host_id,
        names.DEADLINE: repr(spec.deadline),
        names.NONCE: around.nonce,
        names.ISOLATION: isolation(spec, around).model_dump_json(),
        names.START_MODE: start_mode(around),
        names.ENVIRONMENT: spec.config.reference,
        names.LABELS: json.dumps(dict(spec.labels)),
    }


def _container(spec: SandboxSpec, around: Surroundings, name: str) -> dict[str, Any]:
    deploy = spec.config.deploy
    is_second = name == SECOND
    carried = is_second or around.is_carried
    python = docker_python.command(f"{_CARRIED}/python") if carried else ["python3"]
    port = SECOND_PORT if is_second else PORT
    mounts = [_mount("second-home" if is_second else "home", HOME), _mount("memory", "/dev/shm")]
    if not is_second:
        mounts += [_mount("project", PROJECT), _mount("work", WORK)]
        if spec.storage is not None:
            mounts.append(_mount("storage", spec.storage.mount_path))
    if carried:
        mounts.append({**_mount("carried", _CARRIED), "readOnly": True})
    if around.second_image:
        mounts.append(_mount("shared", SHARED))
    if deploy.container.read_only_root:
        mounts.append(_mount("second-tmp" if is_second else "tmp", "/tmp"))
    address = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "name": name,
        "image": around.second_image if is_second else around.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*python, "-c", stage(), around.secret_digest, str(port)],
        "env": [{"name": "AENV_POD_IP", **address}],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"}],
        "workingDir": "/",
        "resources": _resources(deploy, around.place.requests_share),
        "securityContext": _security(deploy),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "File",
    }


def _carrier(around: Surroundings, deploy: DeployConfig) -> dict[str, Any]:
    return {
        "name": CARRIER,
        "image": around.carrier_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "aenv_ray.engines.kubernetes.python_carrier", _CARRIED],
        "resources": _resources(deploy, around.place.requests_share),
        "securityContext": _security(deploy),
        "volumeMounts": [_mount("carried", _CARRIED)],
    }


def _pod_security(spec: SandboxSpec) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if spec.storage is not None:  # its user writes to it, whoever that is
        group = user_of(spec.config.deploy)[1]
        security |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return security


def _claims(spec: SandboxSpec) -> list[dict[str, Any]]:
    if spec.storage is None:
        return []
    return [{"name": "storage", "persistentVolumeClaim": {"claimName": spec.storage.name}}]


def _security(deploy: DeployConfig) -> dict[str, Any]:
    uid, gid = user_of(deploy)
    added = [name.removeprefix("CAP_") for name in deploy.container.cap_add]
    return {
        "runAsUser": uid,
        "runAsGroup": gid,
        "runAsNonRoot": uid != 0,
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": deploy.container.read_only_root,
        "capabilities": {"drop": ["ALL"], **({"add": added} if added else {})},
    }


def user_of(deploy: DeployConfig) -> tuple[int, int]:
    """Return whom a container runs as: the project's word, else nobody.

    Raises:
        ConfigError: The word is a name that only the image knows.
    """
    if not deploy.container.user:
        return NOBODY, NOBODY
    match = _USER.match(deploy.container.user)
    if match is None:
        raise ConfigError(
            f"deployConfig.container.user {deploy.container.user!r} is a name, and Kubernetes "
            "takes numbers",
            hint='write it as "1000:1000"',
        )
    uid, gid = (match[1], match[2] or match[1])
    return (0 if uid == "root" else int(uid)), (0 if gid == "root" else int(gid))


def _resources(deploy: DeployConfig, share: float) -> dict[str, Any]:
    limits, requests = {}, {}
    if deploy.cpu:
        milli = round(units.parse_cpu_cores(deploy.cpu) * 1000)
        limits["cpu"], requests["cpu"] = f"{milli}m", f"{max(1, int(milli * share))}m"
    if deploy.memory:
        size = units.parse_memory_bytes(deploy.memory)
        limits["memory"], requests["memory"] = str(size), str(int(size * share))
    if deploy.ephemeral_storage and not deploy.container.read_only_root:
        size = storage_bytes(deploy) + _HOME_BYTES
        limits["ephemeral-storage"] = str(size)
        requests["ephemeral-storage"] = str(int(size * share))
    return {"requests": requests, "limits": limits} if limits else {}


def _volumes(around: Surroundings, deploy: DeployConfig) -> list[dict[str, Any]]:
    size = str(storage_bytes(deploy))
    volumes = [
        _empty("home", _HOME_BYTES),
        _empty("project", _HOME_BYTES),
        _empty("work", size, in_memory=True),
        _empty("memory", _SHARED_MEMORY_BYTES, in_memory=True),
    ]
    if around.carrier_image:
        volumes.append(_empty("carried", _HOME_BYTES))
    if around.second_image:
        volumes += [_empty("second-home", _HOME_BYTES), _empty("shared", size, in_memory=True)]
    if deploy.container.read_only_root:
        volumes.append(_empty("tmp", size, in_memory=True))
        if around.second_image:
            volumes.append(_empty("second-tmp", size, in_memory=True))
    return volumes


def _empty(name: str, size: str | int, *, in_memory: bool = False) -> dict[str, Any]:
    medium = {"medium": "Memory"} if in_memory else {}
    return {"name": name, "emptyDir": {**medium, "sizeLimit": str(size)}}


def _mount(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": path}


def _affinity(nodes: Sequence[str]) -> dict[str, Any]:
    """Prefer nodes that have the image."""
    terms = [
        {"weight": 10, "preference": {"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}}
        for node in list(nodes)[-_PREFERRED_NODES:]
    ]  # fmt: skip
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


def storage_bytes(deploy: DeployConfig) -> int:
    """Return the size of the work directory."""
    if not deploy.ephemeral_storage:
        return DEFAULT_STORAGE_BYTES
    return units.parse_memory_bytes(deploy.ephemeral_storage)


def stage() -> str:
    """Return the code that process 1 begins with, without what only people read."""
    text = _STAGE.read_text(encoding="utf-8")
    return _NO_DIRECTORY + text[text.index("import ") :]


def start_mode(around: Surroundings) -> str:
    """Return how a pod comes to be, for people."""
    how = "the host's runtime"
    if around.serving is Serving.PUBLIC:
        how = "its own server (public door)"
    elif around.serving is Serving.COMMANDS:
        how = f"commands and files only: {around.absence}"
    second = f"; second: {around.second_image}" if around.second_image else ""
    return f"pod: {around.image} with {how}{second}"


def isolation(spec: SandboxSpec, around: Surroundings) -> Isolation:
    """Return what separates a pod made from these from its node and from the cluster."""
    deploy = spec.config.deploy
    limits = {
        "open files": str(MAX_FILES),
        "storage": f"{storage_bytes(deploy) >> 20} MiB (tmpfs)",
    }
    if deploy.memory:
        size = units.parse_memory_bytes(deploy.memory)
        limits["memory"] = f"{size >> 20} MiB per container (cgroup)"
    if deploy.cpu:
        limits["cpu"] = f"{units.parse_cpu_cores(deploy.cpu):g} cores per container (cgroup)"
    if deploy.ephemeral_storage and not deploy.container.read_only_root:
        limits["image's directories"] = "watched by the node: the pod is evicted with more"
    if spec.storage is not None:
        kept, path = shown_size(spec.storage.size_bytes), spec.storage.mount_path
        limits["kept"] = f"{kept} at {path} (claim {spec.storage.name})"
    missing = ["processes: only the node's own limit of a pod"]
    if not around.is_network_kept:
        label = f"{names.NETWORK}={around.network.value}"
        missing.append(
            f"network: no NetworkPolicy of the namespace selects {label}, so it reaches the "
            "cluster, Ray included"
            if around.is_network_kept is False
            else f"network: this host may not list NetworkPolicies, so whether one keeps {label} "
            "from the cluster is not known"
        )
    if not deploy.container.read_only_root and not deploy.ephemeral_storage:
        missing.append("storage: what it writes to the image's own directories is not limited")
    if around.serving is Serving.PUBLIC:
        missing.append("public door: port 8081 is open to what runs inside, rewards included")
    if deploy.container.cap_add:
        missing.append(f"capabilities: it has {', '.join(deploy.container.cap_add)}")
    return Isolation(
        kind="pod",
        namespaces=("mount", "pid", "ipc", "uts", "net"),
        network=around.network if around.is_network_kept else NetworkMode.HOST,
        read_only_host=True,
        seccomp=True,
        no_new_privileges=True,
        limits=limits,
        missing=tuple(missing),
    )


def listed_isolation(annotations: Mapping[str, str]) -> Isolation:
    """Return the facts that a pod was marked with when it was made."""
    return Isolation.model_validate_json(annotations[names.ISOLATION])
