"""What a container is made from: a spec and facts of the image in, the daemon's JSON out.

Nothing here speaks with anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker import mounts as docker_kept
from aenv_ray.engines.docker.files import ETC_FILES, volume_name
from aenv_ray.engines.docker.surroundings import SecondSurroundings, Surroundings
from aenv_ray.engines.images import node_python as docker_python
from aenv_ray.engines.images.serving import PUBLIC_PORT, SHARED, Serving
from aenv_ray.engines.node import docker_labels as labels
from aenv_ray.engines.node.variables import instance_variables
from aenv_ray.models import Isolation
from aenv_ray.project.config import DeployConfig, NetworkMode
from aenv_ray.project.destinations import is_public, parse_destination
from aenv_ray.runtime.container.process_one import HOME, MAX_FILES, PROJECT, RUN
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES, NOBODY, WORK

_SHARED_MEMORY_BYTES: Final = 64 * 1024**2
_LOG_OPTIONS: Final = {"max-size": "5m", "max-file": "2", "compress": "false"}
_PAGE: Final = 4096
"""More than the work directory holds: a full one is to say that it is full."""
_FIRST_HOST: Final = frozenset({"Dns", "DnsOptions", "ExtraHosts", "CapAdd", "Tmpfs"})
"""Of the ``HostConfig``: what the second container does not get, or has by the first's network."""
_FIRST_ONLY: Final = frozenset({"Hostname", "NetworkDisabled"})
"""With these the daemon would not have the second container join the first's network."""
_BOOT: Final = (
    # The libraries last: what the image has of them is what the environment wants.
    f"import sys; sys.path.insert(0, '{HOME}/runtime'); sys.path.append('{HOME}/lib'); "
    "from aenv_ray.runtime.container.process_one import main; main("
)


def container_body(spec: SandboxSpec, around: Surroundings) -> dict[str, Any]:
    """Return what the daemon makes an instance's container from."""
    deploy = spec.config.deploy
    container = deploy.container
    facts = isolation(spec, around)
    host: dict[str, Any] = {
        "NetworkMode": around.network,
        "Mounts": [*_mounts(around, deploy), *docker_kept.storage_mounts(spec, around.storage)],
        "Tmpfs": _writable(deploy),
        "ReadonlyRootfs": container.read_only_root,
        "CapDrop": ["ALL"],
        "CapAdd": list(container.cap_add),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": container.pids,
        "ShmSize": _SHARED_MEMORY_BYTES,
        "Ulimits": [_ulimit("nofile", MAX_FILES)],
        "LogConfig": {"Type": "local", "Config": _LOG_OPTIONS},
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
        "OomScoreAdj": 500,  # a node short of memory ends a sandbox before anything of its own
    }
    if around.dns:
        host |= {"Dns": list(around.dns), "DnsOptions": list(around.dns_options)}
    if around.hosts:
        host["ExtraHosts"] = list(around.hosts)
    root_bytes = _root_bytes(deploy)
    if root_bytes and around.has_quota:
        host["StorageOpt"] = {"size": str(root_bytes)}
    elif root_bytes:  # the janitor ends what has more in all
        host["Ulimits"].append(_ulimit("fsize", root_bytes + _PAGE))
    if around.runtime:
        host["Runtime"] = around.runtime
    if deploy.memory:
        limit = units.parse_memory_bytes(deploy.memory)
        host |= {"Memory": limit, "MemorySwap": limit}  # no swap besides
    if deploy.cpu:
        host["NanoCpus"] = round(units.parse_cpu_cores(deploy.cpu) * 1e9)
    return {
        **_input(around),
        **_without_network(around),
        "Image": around.image_id,
        "Entrypoint": _entrypoint(around),
        "Cmd": list(spec.arguments),
        "Env": _environment(spec, around),
        "User": user_of(deploy, around.image_user),
        # Not the work directory: the daemon would make it first, and give it its own mode.
        "WorkingDir": "/",
        "Hostname": hostname(spec),
        "Labels": _labels(spec, around, facts),
        "HostConfig": host,
        # An image's own check runs a program in the container again and again.
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 0,
    }


def hostname(spec: SandboxSpec) -> str:
    """Return what a container of the instance takes for the name of its machine."""
    return spec.instance_id[:63]


def second_body(
    spec: SandboxSpec, around: Surroundings, second: SecondSurroundings
) -> dict[str, Any]:
    """Return what the daemon makes the second container of an instance from.

    It has the first one's limits and walls, and joins its network; the project, its variables and
    the door of the first are not in it.
    """
    body = container_body(spec, around)
    script = _boot(around, "commands", "", second.image_directory or "/", ())
    command = [*docker_python.command(f"{HOME}/python"), "-c", script]
    volumes = [m for m in body["HostConfig"]["Mounts"] if m["Type"] == "volume"]
    run = second.run_directory
    sockets = [] if around.has_own_kernel else [_bind(run, RUN, writable=True)]
    mounts = [*sockets, *_kit_mounts(second.kit), *volumes]
    host = body["HostConfig"] | {"NetworkMode": f"container:{around.name}", "Mounts": mounts}
    host = {key: value for key, value in host.items() if key not in _FIRST_HOST}
    if spec.config.deploy.container.read_only_root:
        host["Tmpfs"] = {"/tmp": _writable(spec.config.deploy)["/tmp"]}
    own = {key: value for key, value in body["Labels"].items() if key != labels.INSTANCE_LABEL}
    variables = {
        "AENV_INSTANCE_ID": spec.instance_id,
        "WORK_SHARE": SHARED,
        **({"PATH": second.image_path} if second.image_path else {}),
    }
    second_only = {
        "Image": second.image_id,
        "Entrypoint": command,
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in variables.items()],
        # What lies in it belongs to its own user, mostly root, which has no capability here.
        "User": second.image_user or "0:0",
        "WorkingDir": second.image_directory or "/",
        "Labels": own | {labels.SIDECAR_LABEL: spec.instance_id},
        "HostConfig": host,
    }
    return {key: value for key, value in body.items() if key not in _FIRST_ONLY} | second_only


def _entrypoint(around: Surroundings) -> list[str]:
    if around.serving is Serving.RUNTIME:
        return ["python3", "-P", "-c", _boot(around)]
    directory = (around.image_directory or "/") if around.serving is Serving.PUBLIC else ""
    script = _boot(around, around.serving.value, around.absence, directory, around.server)
    return [*docker_python.command(f"{HOME}/python"), "-c", script]


def _boot(around: Surroundings, *words: object) -> str:
    keyed = ["keyed=True"] if around.has_own_kernel else []
    return f"{_BOOT}{', '.join([*map(repr, words), *keyed])})"


def _input(around: Surroundings) -> dict[str, Any]:
    """Return how a container gets its key, where it has one: on standard input, once."""
    if not around.has_own_kernel:
        return {}
    return {"OpenStdin": True, "StdinOnce": True, "AttachStdin": True}


def _without_network(around: Surroundings) -> dict[str, Any]:
    """Return how the daemon knows that a container has a loopback alone, and nothing from it.

    ``NetworkMode`` alone has Docker before 28 run itself once more for each, with nothing to do:
    half of the time that a container takes to start.
    """
    return {"NetworkDisabled": True} if around.is_unattached else {}


def user_of(deploy: DeployConfig, image_user: str) -> str:
    """Return whom a container runs as: the project's word, else the image's, else nobody."""
    return deploy.container.user or image_user or f"{NOBODY}:{NOBODY}"


def _mounts(around: Surroundings, deploy: DeployConfig) -> list[dict[str, Any]]:
    run = around.run_directory
    sockets = [] if around.has_own_kernel else [_bind(run, RUN, writable=True)]
    mounts = [_bind(around.project_dir, PROJECT), *sockets, *_etc_mounts(around, deploy)]
    if around.resolver_file is not None:
        mounts.append(_bind(around.resolver_file, "/etc/resolv.conf"))
    if around.kit is not None:
        parts = _kit_mounts(around.kit)
        mounts += parts if around.serving is not Serving.RUNTIME else parts[:2]
    if around.second is not None:
        volume = volume_name(around.name)
        size = storage_bytes(deploy)
        mounts.append(docker_kept.shared_volume(volume, around.scope, SHARED, size))
    return mounts


def _etc_mounts(around: Surroundings, deploy: DeployConfig) -> list[dict[str, Any]]:
    """Return the files that the daemon writes for containers with a network alone.

    A second container, which joins the network of the first, has these from the daemon.
    """
    if not around.is_unattached:
        return []
    is_writable = not deploy.container.read_only_root
    return [
        _bind(around.etc_directory / file, f"/etc/{file}", writable=is_writable)
        for file in ETC_FILES
    ]


def _kit_mounts(kit: Path) -> list[dict[str, Any]]:
    return [_bind(kit / part, f"{HOME}/{part}") for part in ("runtime", "lib", "python")]


def _bind(source: Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": not writable}


def _writable(deploy: DeployConfig) -> dict[str, str]:
    """Return what can be written to: the work directory, and /tmp where the rest cannot."""
    size = storage_bytes(deploy)
    options = f"rw,exec,nosuid,nodev,mode=1777,size={size}"
    return {WORK: options, "/tmp": options} if deploy.container.read_only_root else {WORK: options}


def storage_bytes(deploy: DeployConfig) -> int:
    """Return the size of the work directory."""
    if not deploy.ephemeral_storage:
        return DEFAULT_STORAGE_BYTES
    return units.parse_memory_bytes(deploy.ephemeral_storage)


def _root_bytes(deploy: DeployConfig) -> int | None:
    """Return how much may be written to the image's own directories; None: not limited, or none."""
    if deploy.container.read_only_root or not deploy.ephemeral_storage:
        return None
    return storage_bytes(deploy)


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def _environment(spec: SandboxSpec, around: Surroundings) -> list[str]:
    variables = instance_variables(spec, "namespaces", "/usr/bin/python3")
    chosen = {**spec.config.deploy.variables, **spec.environment_variables}
    if "PATH" not in chosen and around.image_path:
        variables["PATH"] = around.image_path
    if around.second is not None:
        variables.setdefault("WORK_SHARE", SHARED)
    variables.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for some costs 20 ms
    return [f"{name}={value}" for name, value in variables.items()]


def _labels(spec: SandboxSpec, around: Surroundings, facts: Isolation) -> dict[str, str]:
    own = {
        labels.SCOPE_LABEL: around.scope,
        labels.HOST_LABEL: around.host_id,
        labels.INSTANCE_LABEL: spec.instance_id,
        labels.DEADLINE_LABEL: repr(spec.deadline),
        labels.DIRECTORY_LABEL: str(around.directory),
        labels.ISOLATION_LABEL: facts.model_dump_json(),
        labels.START_MODE_LABEL: start_mode(around),
    }
    root_bytes = _root_bytes(spec.config.deploy)
    if root_bytes and not around.has_quota:
        own[labels.STORAGE_LABEL] = str(root_bytes)
    if around.has_own_kernel:
        own[labels.LINK_LABEL] = "program"
    if around.second is not None:
        own[labels.VOLUME_LABEL] = volume_name(around.name)
    users = {f"{labels.USER_LABEL_PREFIX}{key}": value for key, value in spec.labels.items()}
    return {**users, **own}


def start_mode(around: Surroundings) -> str:
    """Return how a container comes to be, for people."""
    carried = "its own runtime" if around.kit is None else "the node's runtime"
    if around.serving is Serving.PUBLIC:
        carried = "its own server (public door)"
    elif around.serving is Serving.COMMANDS:
        carried = f"commands and files only: {around.absence}"
    second = f"; second: {around.second.image_id[:19]}" if around.second is not None else ""
    kernel = f"; {around.runtime} gives it its own kernel" if around.has_own_kernel else ""
    return f"container: {around.image_id[:19]} with {carried}{second}{kernel}"


def isolation(spec: SandboxSpec, around: Surroundings) -> Isolation:
    """Return what separates a container made from these from its node."""
    deploy = spec.config.deploy
    network = around.network_mode
    storage = f"{storage_bytes(deploy) >> 20} MiB (tmpfs)"
    limits = {
        "processes": f"{deploy.container.pids} per sandbox",
        "open files": str(MAX_FILES),
        "storage": storage,
    }
    if around.has_own_kernel:
        limits["processes"] = f"{deploy.container.pids} threads of its kernel: with more it ends"
        del limits["open files"]
    root_bytes = _root_bytes(deploy)
    if root_bytes:
        how = "disk quota" if around.has_quota else "each file; watched: it ends with more in all"
        limits["image's directories"] = f"{root_bytes >> 20} MiB ({how})"
    if deploy.memory:
        size = units.parse_memory_bytes(deploy.memory)
        limits["memory"] = f"{size >> 20} MiB per sandbox, without swap (cgroup)"
    if deploy.cpu:
        limits["cpu"] = f"{units.parse_cpu_cores(deploy.cpu):g} cores (cgroup)"
    namespaces = ["mount", "pid", "ipc", "uts"]
    if around.has_user_namespace:
        namespaces.append("user")
    if network is not NetworkMode.HOST:
        namespaces.append("net")
    return Isolation(
        kind="container",
        namespaces=tuple(namespaces),
        network=network,
        allowed=around.allowed,
        read_only_host=True,
        # The daemon's profile is for the node's kernel, which such a container does not reach.
        seccomp=around.has_seccomp and not around.has_own_kernel,
        no_new_privileges=True,
        limits=limits,
        missing=(*_missing(deploy, around, network), *docker_kept.missing(spec)),
    )


def _missing(deploy: DeployConfig, around: Surroundings, network: NetworkMode) -> Sequence[str]:
    missing = []
    if network is NetworkMode.HOST:
        missing.append("network: host, so it reaches the node's services, Ray included")
    if network is NetworkMode.ALLOWLIST:
        missing += _allowed_besides(deploy)
    if not deploy.container.read_only_root and not deploy.ephemeral_storage:
        missing.append("storage: what it writes to the image's own directories is not limited")
    elif _root_bytes(deploy) and not around.has_quota:
        missing.append(
            "storage: until it is looked at, every few seconds, it can write more than its limit "
            "to the image's own directories"
        )
    if not around.has_user_namespace:
        missing.append("user: its users are those of the node, without any capability")
    if not around.has_seccomp:
        missing.append("seccomp: the daemon has no profile")
    if around.has_own_kernel:
        missing.append("open files: its own kernel may not keep their limit")
    if around.serving is Serving.PUBLIC:
        missing.append(
            f"public door: port {PUBLIC_PORT.partition('/')[0]} is open to what runs inside, "
            "rewards included"
        )
    if deploy.container.cap_add:
        missing.append(f"capabilities: it has {', '.join(deploy.container.cap_add)}")
    return missing


def _allowed_besides(deploy: DeployConfig) -> Iterator[str]:
    entries = [parse_destination(entry, what="deployConfig.allow") for entry in deploy.allow or ()]
    if any(entry.name for entry in entries):
        yield "network: names are allowed by address, so others at those addresses are reached too"
    private = [entry.text for entry in entries if entry.block and not is_public(entry.block)]
    if private:
        yield f"network: it reaches what the list allows of private networks: {', '.join(private)}"


def listed_isolation(row_labels: Mapping[str, str]) -> Isolation:
    """Return the facts that a container was labelled with when it was made."""
    return Isolation.model_validate_json(row_labels[labels.ISOLATION_LABEL])
