"""The manifest of a pod, made from a spec and a plan.

Pure functions. Variables and secrets are not in the manifest, where everyone who may list pods
could read them: the host sends them to the pod (`aenv_ray.engines.kubernetes.boot`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.images import node_python
from aenv_ray.engines.images.serving import SHARED, Serving, changeable_python
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.plan import PodPlan
from aenv_ray.engines.kubernetes.settings import END_S, PodSettings
from aenv_ray.engines.node import capabilities
from aenv_ray.engines.node.variables import work_bytes
from aenv_ray.errors import ConfigError
from aenv_ray.models import Isolation
from aenv_ray.project.config import DeployConfig, NetworkMode
from aenv_ray.project.storage import shown_size
from aenv_ray.runtime.container.process_one import HOME, MAX_FILES, PROJECT
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES, NOBODY, WORK

PORT: Final = 8070
"""The port of process 1 in the instance's container."""
SIDECAR_PORT: Final = 8072
_UNPACKER_PORT: Final = 8071
"""Only the pod's own containers can use it, and only until they have what the host sent."""
_CARRIED: Final = f"{HOME}-carried"
_UNPACKED: Final = "/unpacked"
"""Where the unpacker writes the files of each container, in a directory of its name."""
_HOME_BYTES: Final = 512 * 1024**2
_VOLUMES_BYTES: Final = 2 * _HOME_BYTES
"""Size of the volumes on the node's disk that count as a container's: its home, and the project."""
_SHARED_MEMORY_BYTES: Final = 64 * 1024**2
_AWAY_S: Final = 30
"""How long a pod stays on a node that does not answer. Kubernetes' default is five minutes."""
_PREFERRED_NODES: Final = 8
_BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
_UNPACKER: Final = Path(__file__).with_name("unpacker.py")
_UNPACKER_LIMITS: Final = {"memory": 128 << 20, "ephemeral-storage": 16 << 20}
_UNPACKER_REQUESTS: Final = {"cpu": "1m", "memory": str(32 << 20)}
"""Kubernetes reserves them as long as the pod runs, and the unpacker has ended long before. As for
other containers, cpu is requested only if it is limited."""
_SAFE_PATH: Final = "import sys\nsys.path = [path for path in sys.path if path]\n"
"""Keeps Python from importing from the working directory. The option -P does not exist before
Python 3.11, and an older Python must live long enough to report its version."""
_ADDRESS: Final = {
    "name": "AENV_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
}  # fmt: skip
_USER: Final = re.compile(r"^(\d+|root)(?::(\d+|root))?$")


def pod_manifest(spec: SandboxSpec, plan: PodPlan, now: float) -> dict[str, Any]:
    """Return the manifest of an instance's pod.

    Raises:
        ConfigError: The project asks for something that pods do not support.
    """
    deploy = spec.config.deploy
    settings = plan.settings
    containers = [_container(spec, plan, names.MAIN_CONTAINER)]
    if plan.sidecar_image:
        containers.append(_container(spec, plan, names.SIDECAR_CONTAINER))
    containers.append(_unpacker(spec, plan))
    life_s = max(settings.longest_life_s, spec.deadline - now) + settings.grace_s
    pod: dict[str, Any] = {
        "activeDeadlineSeconds": int(life_s),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": END_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": re.sub(r"[^a-z0-9-]", "-", spec.instance_id.lower())[:63].strip("-") or "pod",
        "securityContext": _pod_security(spec),
        "containers": containers,
        "volumes": [*_volumes(plan, deploy), *_claims(spec)],
        "tolerations": [
            {"key": f"node.kubernetes.io/{word}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": _AWAY_S}
            for word in ("not-ready", "unreachable")
        ],
    }  # fmt: skip
    if plan.carrier_image:
        pod["initContainers"] = [_carrier(plan, deploy)]
    runtime = deploy.container.runtime or settings.runtime_class
    if runtime:
        pod["runtimeClassName"] = runtime
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    if settings.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    if settings.user_namespaces:
        pod["hostUsers"] = False
    if settings.priority_class:
        pod["priorityClassName"] = settings.priority_class
    if plan.nodes:
        pod["affinity"] = _affinity(plan.nodes)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": plan.name,
            "labels": names.labels(plan.owner.uid, plan.host_id, plan.network),
            "annotations": _annotations(spec, plan),
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": plan.owner.name,
                 "uid": plan.owner.uid, "controller": False, "blockOwnerDeletion": False}
            ],
        },
        "spec": pod,
    }  # fmt: skip


def _annotations(spec: SandboxSpec, plan: PodPlan) -> dict[str, str]:
    return {
        names.INSTANCE: spec.instance_id,
        names.HOST: plan.host_id,
        names.DEADLINE: repr(spec.deadline),
        names.NONCE: plan.nonce,
        names.ISOLATION: isolation(spec, plan).model_dump_json(),
        names.START_MODE: start_mode(plan),
        names.ENVIRONMENT: spec.config.reference,
        names.LABELS: json.dumps(dict(spec.labels)),
    }


def _container(spec: SandboxSpec, plan: PodPlan, name: str) -> dict[str, Any]:
    deploy = spec.config.deploy
    is_sidecar = name == names.SIDECAR_CONTAINER
    carried = is_sidecar or plan.needs_carried_python
    port = SIDECAR_PORT if is_sidecar else PORT
    mounts = [_mount(*volume, read_only=True) for volume in _unpacked(name)]
    mounts.append(_mount("memory", "/dev/shm"))
    if not is_sidecar:
        mounts.append(_mount("work", WORK))
        if spec.storage is not None:
            mounts.append(_mount("storage", spec.storage.mount_path))
    if carried:
        mounts.append(_mount("carried", _CARRIED, read_only=True))
    if plan.sidecar_image:
        mounts.append(_mount("shared", SHARED))
    if deploy.container.read_only_root:
        mounts.append(_mount("sidecar-tmp" if is_sidecar else "tmp", "/tmp"))
    return {
        "name": name,
        "image": plan.sidecar_image if is_sidecar else plan.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            *_python(carried), "-c", code_of(_BOOTSTRAP), plan.secret_digest, str(port),
            str(_UNPACKER_PORT),
        ],
        "env": [_ADDRESS],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"}],
        "workingDir": "/",
        "resources": _resources(deploy, plan.settings),
        "securityContext": _security(deploy, is_sidecar=is_sidecar),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "File",
    }  # fmt: skip


def _python(carried: bool) -> list[str]:
    return node_python.command(f"{_CARRIED}/python") if carried else ["python3"]


def _unpacked(name: str) -> list[tuple[str, str]]:
    """Return the volumes whose files the unpacker writes for a container, and their paths there.

    The container has them read-only: its user is that of all commands of the agent, and would
    otherwise own the code that answers for rewards.
    """
    if name == names.SIDECAR_CONTAINER:
        return [("sidecar-home", HOME)]
    return [("home", HOME), ("project", PROJECT)]


def unpack_order(name: str, *, hides: bool) -> dict[str, str]:
    """Return what a container tells the unpacker: where its files go, and what to hide later."""
    target = f"{_UNPACKED}/{name}"
    return {"target": target, "hidden": f"{target}{PROJECT}" if hides else ""}


def _unpacker(spec: SandboxSpec, plan: PodPlan) -> dict[str, Any]:
    """Return the container that writes what the others may only read.

    It is no init container: the node would start the others a second after its end.
    """
    deploy = spec.config.deploy
    served = [names.MAIN_CONTAINER, *([names.SIDECAR_CONTAINER] if plan.sidecar_image else [])]
    mounts = [
        _mount(volume, f"{_UNPACKED}/{name}{path}")
        for name in served
        for volume, path in _unpacked(name)
    ]
    if plan.needs_carried_python:
        mounts.append(_mount("carried", _CARRIED, read_only=True))
    sizes = {name: str(size) for name, size in _UNPACKER_LIMITS.items()}
    limits = {**_resources(deploy, plan.settings)["limits"], **sizes}
    requests = {name: size for name, size in _UNPACKER_REQUESTS.items() if name in limits}
    security = _security(deploy)
    return {
        "name": names.UNPACKER_CONTAINER,
        "image": plan.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            *_python(plan.needs_carried_python), "-c", code_of(_UNPACKER), str(_UNPACKER_PORT),
            str(len(served)),
        ],
        "env": [_ADDRESS],
        "workingDir": "/",
        "resources": {"requests": requests, "limits": limits},
        "securityContext": security | {
            "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip


def _carrier(plan: PodPlan, deploy: DeployConfig) -> dict[str, Any]:
    return {
        "name": names.CARRIER_CONTAINER,
        "image": plan.carrier_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "aenv_ray.engines.images.runtime_bundle", _CARRIED],
        "resources": _resources(deploy, plan.settings),
        "securityContext": _security(deploy),
        "volumeMounts": [_mount("carried", _CARRIED)],
    }


def _pod_security(spec: SandboxSpec) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if spec.storage is not None:  # the container's user must be able to write to it
        group = user_of(spec.config.deploy)[1]
        security |= {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return security


def _claims(spec: SandboxSpec) -> list[dict[str, Any]]:
    if spec.storage is None:
        return []
    return [{"name": "storage", "persistentVolumeClaim": {"claimName": spec.storage.name}}]


def _security(deploy: DeployConfig, *, is_sidecar: bool = False) -> dict[str, Any]:
    uid, gid = user_of(deploy)
    wanted = deploy.container.sidecar_cap_add if is_sidecar else deploy.container.cap_add
    added = capabilities.added(wanted)
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
    """Return user and group of a container: the project's, or nobody by default.

    Raises:
        ConfigError: The project names a user by name, which only the image could resolve.
    """
    if not deploy.container.user:
        return NOBODY, NOBODY
    match = _USER.match(deploy.container.user)
    if match is None:
        raise ConfigError(
            f"deployConfig.container.user {deploy.container.user!r} is a name, and Kubernetes "
            "accepts only numbers",
            hint='write it as "1000:1000"',
        )
    uid, gid = (match[1], match[2] or match[1])
    return (0 if uid == "root" else int(uid)), (0 if gid == "root" else int(gid))


def memory_bytes(deploy: DeployConfig, settings: PodSettings) -> int:
    """Return the memory limit of a container.

    The default is meant for a work directory of default size: a larger one, which is in memory too,
    adds to it. Else a project that uses the storage it requests would be killed for its memory.
    """
    if deploy.memory:
        return units.parse_memory_bytes(deploy.memory)
    return settings.memory_bytes + max(0, work_bytes(deploy) - DEFAULT_STORAGE_BYTES)


def root_bytes(deploy: DeployConfig, settings: PodSettings) -> int:
    """Return the limit of what a container writes to its image's directories; 0 if read-only."""
    if deploy.container.read_only_root:
        return 0
    return work_bytes(deploy) if deploy.ephemeral_storage else settings.disk_bytes


def _resources(deploy: DeployConfig, settings: PodSettings) -> dict[str, Any]:
    """Return the limits of a container, and what it requests of them.

    Memory and disk always have a limit. Without, a container that used up its node's could make the
    node end it, which looks like a failure of the infrastructure and voids the episode.
    """
    sizes = {
        "memory": memory_bytes(deploy, settings),
        "ephemeral-storage": root_bytes(deploy, settings) + _VOLUMES_BYTES,
    }
    limits = {name: str(size) for name, size in sizes.items()}
    share = settings.requests_share
    requests = {name: str(int(size * share)) for name, size in sizes.items()}
    if deploy.cpu:
        milli = round(units.parse_cpu_cores(deploy.cpu) * 1000)
        limits["cpu"], requests["cpu"] = f"{milli}m", f"{max(1, int(milli * share))}m"
    return {"requests": requests, "limits": limits}


def _volumes(plan: PodPlan, deploy: DeployConfig) -> list[dict[str, Any]]:
    size = str(work_bytes(deploy))
    volumes = [
        _empty("home", _HOME_BYTES),
        _empty("project", _HOME_BYTES),
        _empty("work", size, in_memory=True),
        _empty("memory", _SHARED_MEMORY_BYTES, in_memory=True),
    ]
    if plan.carrier_image:
        volumes.append(_empty("carried", _HOME_BYTES))
    if plan.sidecar_image:
        volumes += [_empty("sidecar-home", _HOME_BYTES), _empty("shared", size, in_memory=True)]
    if deploy.container.read_only_root:
        volumes.append(_empty("tmp", size, in_memory=True))
        if plan.sidecar_image:
            volumes.append(_empty("sidecar-tmp", size, in_memory=True))
    return volumes


def _empty(name: str, size: str | int, *, in_memory: bool = False) -> dict[str, Any]:
    medium = {"medium": "Memory"} if in_memory else {}
    return {"name": name, "emptyDir": {**medium, "sizeLimit": str(size)}}


def _mount(name: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def _affinity(nodes: Sequence[str]) -> dict[str, Any]:
    """Return an affinity to nodes that have the image."""
    terms = [
        {"weight": 10, "preference": {"matchFields": [
            {"key": "metadata.name", "operator": "In", "values": [node]}]}}
        for node in list(nodes)[-_PREFERRED_NODES:]
    ]  # fmt: skip
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}


def code_of(script: Path) -> str:
    """Return the code of a program that a container's command contains, without its docstring."""
    text = script.read_text(encoding="utf-8")
    return _SAFE_PATH + text[text.index("import ") :]


def start_mode(plan: PodPlan) -> str:
    """Return how a pod was started, for people."""
    how = "the host's runtime"
    if plan.serving is Serving.PUBLIC:
        how = "its own server (public door)"
    elif plan.serving is Serving.COMMANDS:
        how = f"commands and files only: {plan.no_tools_reason}"
    sidecar = f"; sidecar: {plan.sidecar_image}" if plan.sidecar_image else ""
    return f"pod: {plan.image} with {how}{sidecar}"


def isolation(spec: SandboxSpec, plan: PodPlan) -> Isolation:
    """Return what isolates a pod from its node and from the cluster."""
    deploy = spec.config.deploy
    limits = {
        "open files": str(MAX_FILES),
        "storage": f"{work_bytes(deploy) >> 20} MiB (tmpfs)",
        "memory": f"{memory_bytes(deploy, plan.settings) >> 20} MiB per container (cgroup)",
    }
    if deploy.cpu:
        limits["cpu"] = f"{units.parse_cpu_cores(deploy.cpu):g} cores per container (cgroup)"
    root = root_bytes(deploy, plan.settings)
    if root:
        limits["image's directories"] = (
            f"{root >> 20} MiB per container: the node evicts a pod that exceeds it"
        )
    if spec.storage is not None:
        kept, path = shown_size(spec.storage.size_bytes), spec.storage.mount_path
        limits["kept"] = f"{kept} at {path} (claim {spec.storage.name})"
    missing = ["processes: limited only by the node's limit per pod"]
    if not plan.is_egress_limited:
        label = f"{names.NETWORK}={plan.network.value}"
        missing.append(
            f"network: no NetworkPolicy of the namespace selects {label}, so it can reach the "
            "cluster, including Ray"
            if plan.is_egress_limited is False
            else "network: unknown whether it can reach the cluster: this host may not list "
            "NetworkPolicies"
        )
    if plan.settings.requests_share < 1.0:
        missing.append(
            f"memory, storage: its node reserves {plan.settings.requests_share:.0%} of the limits, "
            "and may evict it, which voids its episode, if it uses more than that"
        )
    if root:
        missing.append(
            "inodes: the number of files in the image's directories is not limited, and a node "
            "whose inodes run out may evict it, which voids its episode; "
            "deployConfig.container.readOnlyRoot prevents that"
        )
    user = ":".join(map(str, user_of(deploy)))
    if changes := changeable_python(deploy, plan.serving, user):
        missing.append(changes)
    if plan.serving is Serving.PUBLIC:
        missing.append("public door: processes inside can use port 8081, rewards included")
    if deploy.container.cap_add:
        missing.append(
            f"capabilities: it has {', '.join(capabilities.added(deploy.container.cap_add))}"
        )
    own_users = ("user",) if plan.settings.user_namespaces else ()
    return Isolation(
        kind="pod",
        namespaces=(*own_users, "mount", "pid", "ipc", "uts", "net"),
        network=plan.network if plan.is_egress_limited else NetworkMode.HOST,
        read_only_host=True,
        seccomp=True,
        no_new_privileges=True,
        limits=limits,
        missing=tuple(missing),
    )
