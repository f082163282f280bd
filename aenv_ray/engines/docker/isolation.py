"""What separates a container from its node: the facts that an instance's `Isolation` states."""

from __future__ import annotations

from collections.abc import Iterator

from aenv_ray import units
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.docker.plan import ContainerPlan
from aenv_ray.engines.images.serving import PUBLIC_PORT, Serving, changeable_python
from aenv_ray.engines.node import capabilities
from aenv_ray.engines.node.memory import DEFAULT_LIMIT_SHARE
from aenv_ray.engines.node.variables import work_bytes
from aenv_ray.models import Isolation
from aenv_ray.policy import is_not_root
from aenv_ray.project.config import DeployConfig, NetworkMode
from aenv_ray.project.destinations import is_public, parse_destination
from aenv_ray.project.storage import shown_size
from aenv_ray.runtime.container.process_one import MAX_FILES
from aenv_ray.runtime.fork.jail_spec import NOBODY, unlimited_storage


def root_bytes(deploy: DeployConfig, plan: ContainerPlan) -> int | None:
    """Return the limit of writes to the image's directories; None if they are read-only."""
    if deploy.container.read_only_root:
        return None
    return work_bytes(deploy) if deploy.ephemeral_storage else plan.disk_bytes


def user_of(deploy: DeployConfig, image_user: str) -> str:
    """Return the user of a container: the project's choice, else the image's, else nobody."""
    return deploy.container.user or image_user or f"{NOBODY}:{NOBODY}"


def isolation(spec: SandboxSpec, plan: ContainerPlan) -> Isolation:
    """Return the facts about a planned container."""
    network = plan.network.mode
    namespaces = ["mount", "pid", "ipc", "uts"]
    if plan.daemon.user_namespaces:
        namespaces.append("user")
    if network is not NetworkMode.HOST:
        namespaces.append("net")
    return Isolation(
        kind="container",
        namespaces=tuple(namespaces),
        network=network,
        allowed=plan.network.allowed,
        read_only_host=True,
        # The daemon's profile filters calls to the node's kernel, which this one does not make.
        seccomp=plan.daemon.seccomp and not plan.runtime.has_own_kernel,
        no_new_privileges=True,
        limits=_limits(spec.config.deploy, plan),
        missing=tuple(_missing(spec, plan)),
    )


def _limits(deploy: DeployConfig, plan: ContainerPlan) -> dict[str, str]:
    limits = {
        "processes": f"{deploy.container.pids} per sandbox",
        "open files": str(MAX_FILES),
        "storage": f"{work_bytes(deploy) >> 20} MiB (tmpfs)",
    }
    if plan.runtime.has_own_kernel:
        limits["processes"] = f"{deploy.container.pids} threads of its kernel; it ends above that"
        del limits["open files"]
    root = root_bytes(deploy, plan)
    if root:
        per_file = "" if plan.storage else "per file; "
        how = "disk quota" if plan.daemon.disk_quota else f"{per_file}it ends above that in total"
        limits["image's directories"] = f"{root >> 20} MiB ({how})"
    memory = memory_bytes(deploy, plan)
    if memory:
        limits["memory"] = f"{memory >> 20} MiB per sandbox, without swap (cgroup)"
    if deploy.cpu:
        limits["cpu"] = f"{units.parse_cpu_cores(deploy.cpu):g} cores (cgroup)"
    return limits


def memory_bytes(deploy: DeployConfig, plan: ContainerPlan) -> int:
    """Return a container's memory limit; 0 if the daemon does not tell what the default is."""
    if deploy.memory:
        return units.parse_memory_bytes(deploy.memory)
    return int(DEFAULT_LIMIT_SHARE * plan.daemon.memory_bytes)


def _missing(spec: SandboxSpec, plan: ContainerPlan) -> Iterator[str]:
    deploy, network = spec.config.deploy, plan.network.mode
    if network is NetworkMode.HOST:
        yield "network: host, so it reaches the node's services, Ray included"
    if network is NetworkMode.ALLOWLIST:
        yield from _allowed_by_address(deploy)
    if root_bytes(deploy, plan) and not plan.daemon.disk_quota:
        yield (
            "storage: writes to the image's own directories are checked every few seconds, and can "
            "exceed the limit until then"
        )
    yield from _users(deploy, plan)
    if not plan.daemon.seccomp:
        yield "seccomp: the daemon has no profile"
    if not memory_bytes(deploy, plan):
        yield "memory: no limit, because the daemon does not tell how much its machine has"
    if plan.runtime.has_own_kernel:
        yield "open files: its own kernel may not enforce the limit"
    if plan.program.serving is Serving.PUBLIC:
        port = PUBLIC_PORT.partition("/")[0]
        yield f"public door: port {port} is open to what runs inside, rewards included"
    if deploy.container.cap_add:
        names = capabilities.added(deploy.container.cap_add)
        yield f"capabilities: it has {', '.join(names)}"
    if deploy.is_dual and deploy.container.sidecar_cap_add:
        names = capabilities.added(deploy.container.sidecar_cap_add)
        yield f"capabilities: its sidecar has {', '.join(names)}"
    if spec.storage is not None:
        yield unlimited_storage(spec.storage.mount_path, shown_size(spec.storage.size_bytes))


def _users(deploy: DeployConfig, plan: ContainerPlan) -> Iterator[str]:
    if not plan.daemon.user_namespaces:
        yield "user: its users are those of the node, without any capability"
    user = user_of(deploy, plan.image.user)
    if changes := changeable_python(deploy, plan.program.serving, user):
        yield changes
    if plan.sidecar is not None and not is_not_root(plan.sidecar.user):
        yield f"user: its sidecar runs as {plan.sidecar.user}, as its image says: it may be root"


def _allowed_by_address(deploy: DeployConfig) -> Iterator[str]:
    entries = [parse_destination(entry, what="deployConfig.allow") for entry in deploy.allow or ()]
    if any(entry.name for entry in entries):
        yield "network: names are allowed by address, so others at those addresses are reached too"
    private = [entry.text for entry in entries if entry.block and not is_public(entry.block)]
    if private:
        yield f"network: it reaches what the list allows of private networks: {', '.join(private)}"
