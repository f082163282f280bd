"""The JSON from which the daemon creates containers: a pure function of spec and plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker.files import ETC_FILES
from aenv_ray.engines.docker.isolation import isolation, memory_bytes, root_bytes, user_of
from aenv_ray.engines.docker.names import volume_name
from aenv_ray.engines.docker.plan import ContainerPlan, SidecarPlan
from aenv_ray.engines.images import node_python
from aenv_ray.engines.images.serving import SHARED, Serving
from aenv_ray.engines.node import capabilities
from aenv_ray.engines.node import docker_labels as labels
from aenv_ray.engines.node.variables import instance_variables, work_bytes
from aenv_ray.project.config import DeployConfig, NetworkMode
from aenv_ray.runtime.container.process_one import (
    HOME,
    MAX_FILES,
    PROJECT,
    RUN,
    SHARED_STORAGE_LOCK,
    STORAGE_LOCK,
)
from aenv_ray.runtime.fork.jail_spec import WORK, tmpfs_size

_SHARED_MEMORY: Final = f"nosuid,nodev,mode=1777,{tmpfs_size(64 * 1024**2)}"
_LOG_OPTIONS: Final = {"max-size": "5m", "max-file": "2", "compress": "false"}
_LOOPBACK: Final = (("127.0.0.1", "localhost"), ("::1", "localhost ip6-localhost ip6-loopback"))
_PAGE: Final = 4096
"""More than the work directory holds, so that a full one reports that it is full."""
_MOUNTS_BYTES: Final = 4096
"""Size of a directory that has only mounts."""
_MAIN_ONLY: Final = frozenset({"Hostname", "NetworkDisabled"})
"""With these the daemon refuses to let a sidecar join the main container's network."""
_BOOT: Final = (
    # Our libraries last: those of the image are the ones that the environment wants.
    f"import sys; sys.path.insert(0, '{HOME}/runtime'); sys.path.append('{HOME}/lib'); "
    "from aenv_ray.runtime.container.process_one import main; main("
)


def container_body(spec: SandboxSpec, plan: ContainerPlan) -> dict[str, Any]:
    """Return the request body that creates an instance's main container."""
    deploy = spec.config.deploy
    return {
        **_key_input(plan),
        **_offline(plan),
        "Image": plan.image.id,
        "Entrypoint": _entrypoint(plan),
        "Cmd": list(spec.arguments),
        "Env": _environment(spec, plan),
        "User": user_of(deploy, plan.image.user),
        # Not the work directory: the daemon would create it first, with its own mode.
        "WorkingDir": "/",
        "Hostname": _hostname(spec, plan),
        "Labels": _labels(spec, plan),
        "HostConfig": _host_config(spec, plan),
        # An image's own health check would start a program in the container again and again.
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 0,
    }


def sidecar_body(spec: SandboxSpec, plan: ContainerPlan, sidecar: SidecarPlan) -> dict[str, Any]:
    """Return the request body that creates an instance's sidecar.

    It has the limits and restrictions of the main container and joins its network. It has neither
    the project nor the variables nor the door of the main container.
    """
    body = container_body(spec, plan)
    script = _boot(plan, "commands", "", sidecar.image.directory or "/", ())
    deploy = spec.config.deploy
    shared = _shared_volume(plan, work_bytes(deploy))
    mounts = [
        *_socket_mounts(plan, sidecar.name),
        *_etc_mounts(plan, sidecar.name),
        *_bundle_mounts(sidecar.bundle),
        shared,
    ]
    host = body["HostConfig"] | {"NetworkMode": f"container:{plan.name}", "Mounts": mounts}
    host["CapAdd"] = capabilities.added(deploy.container.sidecar_cap_add)
    host["Tmpfs"] = {path: options for path, options in _tmpfs(deploy).items() if path != WORK}
    own_labels = {key: v for key, v in body["Labels"].items() if key != labels.INSTANCE_LABEL}
    variables = {
        "AENV_INSTANCE_ID": spec.instance_id,
        "WORK_SHARE": SHARED,
        **({"PATH": sidecar.image.path} if sidecar.image.path else {}),
    }
    sidecar_only = {
        "Image": sidecar.image.id,
        "Entrypoint": [*node_python.command(f"{HOME}/python"), "-c", script],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in variables.items()],
        "User": sidecar.user,
        "WorkingDir": sidecar.image.directory or "/",
        "Labels": own_labels | {labels.SIDECAR_LABEL: spec.instance_id},
        "HostConfig": host,
    }
    return {key: value for key, value in body.items() if key not in _MAIN_ONLY} | sidecar_only


def etc_files(spec: SandboxSpec, plan: ContainerPlan) -> dict[str, str]:
    """Return the `ETC_FILES` of an instance's containers, as far as they are not the node's."""
    name = _hostname(spec, plan)
    own = {"hostname": f"{name}\n"}
    if plan.network.mode is NetworkMode.HOST:
        return own
    rows = [*_LOOPBACK, ("127.0.1.1", name), *plan.network.hosts]
    hosts = "".join(f"{address}\t{names}\n" for address, names in rows)
    return {**own, "hosts": hosts, "resolv.conf": plan.network.resolvers}


def _hostname(spec: SandboxSpec, plan: ContainerPlan) -> str:
    """Return the host name: on a bridge the daemon's DNS tells it to the other sandboxes there."""
    is_alone = plan.network.mode in (NetworkMode.NONE, NetworkMode.HOST)
    return spec.instance_id[:63] if is_alone else "sandbox"


def start_mode(plan: ContainerPlan) -> str:
    """Return how a container was started, for people."""
    runtime = "its own runtime" if plan.program.bundle is None else "the node's runtime"
    if plan.program.serving is Serving.PUBLIC:
        runtime = "its own server (public door)"
    elif plan.program.serving is Serving.COMMANDS:
        runtime = f"commands and files only: {plan.program.lack}"
    sidecar = f"; sidecar: {plan.sidecar.image.id[:19]}" if plan.sidecar is not None else ""
    kernel = f"; own kernel by {plan.runtime.name}" if plan.runtime.has_own_kernel else ""
    return f"container: {plan.image.id[:19]} with {runtime}{sidecar}{kernel}"


# --- the process ----------------------------------------------------------------------------------


def _entrypoint(plan: ContainerPlan) -> list[str]:
    program = plan.program
    if program.serving is Serving.RUNTIME:
        return ["python3", "-P", "-c", _boot(plan)]
    directory = (plan.image.directory or "/") if program.serving is Serving.PUBLIC else ""
    script = _boot(plan, program.serving.value, program.lack, directory, program.server)
    return [*node_python.command(f"{HOME}/python"), "-c", script]


def _boot(plan: ContainerPlan, *arguments: object) -> str:
    keyed = ["keyed=True"] if plan.runtime.has_own_kernel else []
    return f"{_BOOT}{', '.join([*map(repr, arguments), *keyed])})"


def _key_input(plan: ContainerPlan) -> dict[str, Any]:
    """A container with its own kernel reads its key from standard input, once."""
    if not plan.runtime.has_own_kernel:
        return {}
    return {"OpenStdin": True, "StdinOnce": True, "AttachStdin": True}


def _environment(spec: SandboxSpec, plan: ContainerPlan) -> list[str]:
    variables = instance_variables(spec, "namespaces", "/usr/bin/python3")
    chosen = {**spec.config.deploy.variables, **spec.environment_variables}
    if "PATH" not in chosen and plan.image.path:
        variables["PATH"] = plan.image.path
    if plan.sidecar is not None:
        variables.setdefault("WORK_SHARE", SHARED)
    # The search for plugins takes 20 ms.
    variables.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    return [f"{name}={value}" for name, value in variables.items()]


def _labels(spec: SandboxSpec, plan: ContainerPlan) -> dict[str, str]:
    own = {
        labels.SCOPE_LABEL: plan.host.scope,
        labels.HOST_LABEL: plan.host.id,
        labels.INSTANCE_LABEL: spec.instance_id,
        labels.DEADLINE_LABEL: repr(spec.deadline),
        labels.DIRECTORY_LABEL: str(plan.host.files.directory),
        labels.ISOLATION_LABEL: isolation(spec, plan).model_dump_json(),
        labels.START_MODE_LABEL: start_mode(plan),
    }
    checked = _checked_bytes(spec, plan)
    if checked:
        own[labels.STORAGE_LABEL] = str(checked)
    if plan.runtime.has_own_kernel:
        own[labels.LINK_LABEL] = "exec"
    if plan.sidecar is not None:
        own[labels.VOLUME_LABEL] = volume_name(plan.name)
    users = {f"{labels.USER_LABEL_PREFIX}{key}": value for key, value in spec.labels.items()}
    return {**users, **own}


# --- limits and network ---------------------------------------------------------------------------


def _host_config(spec: SandboxSpec, plan: ContainerPlan) -> dict[str, Any]:
    deploy = spec.config.deploy
    host: dict[str, Any] = {
        "NetworkMode": plan.network.name,
        "Mounts": [
            *_mounts(plan, deploy),
            *_storage_mounts(spec, plan),
        ],
        "Tmpfs": _tmpfs(deploy),
        "ReadonlyRootfs": deploy.container.read_only_root,
        "CapDrop": ["ALL"],
        "CapAdd": capabilities.added(deploy.container.cap_add),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": deploy.container.pids,
        "Ulimits": [_ulimit("nofile", MAX_FILES)],
        "LogConfig": {"Type": "local", "Config": _LOG_OPTIONS},
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
        "OomScoreAdj": 1000,  # as Ray's workers have: the kernel kills the largest of them first
    }
    root = root_bytes(deploy, plan)
    if root and plan.daemon.disk_quota:
        host["StorageOpt"] = {"size": str(root)}
    checked = _checked_bytes(spec, plan)
    # For the sum of all files the janitor ends the container. Files of a storage may be larger.
    if checked and plan.storage is None:
        host["Ulimits"].append(_ulimit("fsize", checked + _PAGE))
    if plan.runtime.name:
        host["Runtime"] = plan.runtime.name
    limit = memory_bytes(deploy, plan)
    if limit:
        host |= {"Memory": limit, "MemorySwap": limit}  # no additional swap
    if deploy.cpu:
        host["NanoCpus"] = round(units.parse_cpu_cores(deploy.cpu) * 1e9)
    return host


def _checked_bytes(spec: SandboxSpec, plan: ContainerPlan) -> int | None:
    """Return the size of directories above which the janitor ends the container; None for none.

    The daemon limits neither the volumes of an image, nor, without a disk quota, the rest of it.
    """
    deploy = spec.config.deploy
    images = [plan.image, *([plan.sidecar.image] if plan.sidecar else [])]
    if any(image.volumes for image in images):
        return work_bytes(deploy) if deploy.container.read_only_root else root_bytes(deploy, plan)
    return None if plan.daemon.disk_quota else root_bytes(deploy, plan)


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def _offline(plan: ContainerPlan) -> dict[str, Any]:
    """Tell the daemon not to set up a network at all.

    With ``NetworkMode`` alone, Docker before 28 runs itself once more for each container, to no
    effect: half of the time that a container takes to start.
    """
    return {"NetworkDisabled": True} if plan.is_offline else {}


# --- mounts ---------------------------------------------------------------------------------------


def _mounts(plan: ContainerPlan, deploy: DeployConfig) -> list[dict[str, Any]]:
    mounts = [
        _bind(plan.project_dir, PROJECT),
        *_socket_mounts(plan, plan.name),
        *_etc_mounts(plan, plan.name),
    ]
    if plan.program.bundle is not None:
        parts = _bundle_mounts(plan.program.bundle)
        mounts += parts if plan.program.serving is not Serving.RUNTIME else parts[:-1]
    if plan.sidecar is not None:
        mounts.append(_shared_volume(plan, work_bytes(deploy)))
    return mounts


def _socket_mounts(plan: ContainerPlan, name: str) -> list[dict[str, Any]]:
    files = plan.host.files
    return [] if plan.runtime.has_own_kernel else [_bind(files.run_directory(name), RUN)]


def _etc_mounts(plan: ContainerPlan, name: str) -> list[dict[str, Any]]:
    """Return the `ETC_FILES`; on the node's network, names are those of the node."""
    own = plan.host.files.etc_directory(name)
    of_node = {"hosts", "resolv.conf"} if plan.network.mode is NetworkMode.HOST else ()
    return [
        _bind((Path("/etc") if file in of_node else own) / file, f"/etc/{file}")
        for file in ETC_FILES
    ]


def _bundle_mounts(bundle: Path) -> list[dict[str, Any]]:
    """Return the parts of a bundle, and a directory for them that root inside cannot exchange.

    A mount cannot be renamed, but a directory that contains mounts can.
    """
    options = {"SizeBytes": _MOUNTS_BYTES, "Mode": 0o755}
    home = {"Type": "tmpfs", "Target": HOME, "ReadOnly": True, "TmpfsOptions": options}
    return [
        home,
        *(_bind(bundle / part, f"{HOME}/{part}") for part in ("runtime", "lib", "python")),
    ]


def _storage_mounts(spec: SandboxSpec, plan: ContainerPlan) -> list[dict[str, Any]]:
    if spec.storage is None or plan.storage is None:
        return []
    lock = SHARED_STORAGE_LOCK if spec.storage.is_shared else STORAGE_LOCK
    return [
        _bind(plan.storage.data, spec.storage.mount_path, writable=True),
        _bind(plan.storage.lock, lock, writable=True),
    ]


def _shared_volume(plan: ContainerPlan, size_bytes: int) -> dict[str, Any]:
    """Return the volume that main container and sidecar share: in memory, of limited size."""
    options = f"mode=1777,nosuid,nodev,{tmpfs_size(size_bytes)}"
    return {
        "Type": "volume",
        "Source": volume_name(plan.name),
        "Target": SHARED,
        "VolumeOptions": {
            "NoCopy": True,
            "Labels": {labels.SCOPE_LABEL: plan.host.scope},
            "DriverConfig": {
                "Name": "local",
                "Options": {"type": "tmpfs", "device": "tmpfs", "o": options},
            },
        },
    }


def _tmpfs(deploy: DeployConfig) -> dict[str, str]:
    """Return what is writable in memory: the work directory, and /tmp if the rest is read-only.

    The daemon's own ``/dev/shm`` has no limit of files.
    """
    options = f"rw,exec,nosuid,nodev,mode=1777,{tmpfs_size(work_bytes(deploy))}"
    found = {WORK: options, "/dev/shm": f"rw,noexec,{_SHARED_MEMORY}"}
    return found | {"/tmp": options} if deploy.container.read_only_root else found


def _bind(source: Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": not writable}
