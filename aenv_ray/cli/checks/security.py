"""``aenv doctor --security``: what separates publishers, agents, owners and users on this machine.

``docs/security.md`` explains the findings. A finding is *failed* if the operator must change
something before others may use the gateway. Without a gateway it is a warning, because those who
publish environments then run them, too.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from aenv_ray.addresses import is_loopback
from aenv_ray.cli.checks import node as node_checks
from aenv_ray.config import Settings
from aenv_ray.errors import AenvError
from aenv_ray.findings import Finding, Verdict
from aenv_ray.policy import ANY, STRICT, Policy, policy_of
from aenv_ray.runtime.fork.jail_spec import MAX_FILES

if TYPE_CHECKING:
    from aenv_ray.local_fabric import LocalFabric

_CGROUPS: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = "cgroup.controllers"
_QUEUE: Final = Path("/proc/sys/net/core/wmem_default")
_USUAL_QUEUE_BYTES: Final = 212_992
_RAYS_PROGRAMS: Final = ("/gcs_server", "/raylet")
_PRIVATE_SCHEMES: Final = ("rediss", "unix", "rediss+sentinel", "rediss+cluster")
_KNOWN_GAPS: Final[Mapping[str, str]] = {
    "process": "a vulnerability in the node's kernel; side channels between sandboxes of a node",
    "docker": "a vulnerability in the node's kernel, unless the OCI runtime has its own; side "
    "channels between sandboxes of a node; the number of files on the daemon's disk, without "
    "readOnlyRoot",
    "kubernetes": "a vulnerability in the node's kernel, unless the RuntimeClass has its own; side "
    "channels between pods of a node; processes per pod beyond the kubelet's limit; nodes that run "
    "short of inodes, without deployConfig.container.readOnlyRoot, or of memory or disk, if pods "
    "request less than their limits (AENV_KUBERNETES_REQUESTS)",
}


def findings(
    settings: Settings, fabric: LocalFabric | None, *, behind_gateway: bool
) -> list[Finding]:
    """Return the findings for this machine and configuration; blocks.

    Args:
        settings: The settings of this process; hosts read those of their Ray node.
        fabric: What ``aenv up`` started. None: nothing.
        behind_gateway: Whether a gateway runs, or is to be judged as if it did.
    """
    policy = policy_of(settings, behind_gateway=behind_gateway)
    found = [
        *process_engine(settings, policy),
        *docker_engine(settings, policy),
        cgroups(),
        *policy_findings(policy),
        tokens(fabric),
        files(private_paths(settings, fabric)),
        *ray_addresses(fabric),
        *gateway_address(fabric),
        redis(settings.redis_url, settings.redis_password),
        *not_defended(policy),
    ]
    return found if behind_gateway else [_as_warning(finding) for finding in found]


def _as_warning(finding: Finding) -> Finding:
    if finding.verdict is not Verdict.FAILED:
        return finding
    return replace(finding, verdict=Verdict.WARNING)


# --- engines --------------------------------------------------------------------------------------


def process_engine(settings: Settings, policy: Policy) -> list[Finding]:
    """Start a sandbox of the process engine, and report its isolation and limits."""
    name = "process sandboxes"
    if not policy.allows_engine("process"):
        return [Finding(name, Verdict.OK, "the policy does not allow this engine")]
    try:
        isolation = asyncio.run(node_checks.process_isolation(settings))
    except node_checks.CHECK_ERRORS as exc:
        # Where isolation is required, an engine that does not start harms nobody.
        verdict = Verdict.WARNING if policy.isolation == "required" else Verdict.FAILED
        return [Finding(name, verdict, node_checks.line(exc), node_checks.NAMESPACES_HINT)]
    limits = "; ".join(f"{key}: {value}" for key, value in isolation.limits.items())
    rows = [Finding("process limits", Verdict.OK, limits), kernel_memory(isolation.limits)]
    missing = "; ".join(isolation.missing)
    if isolation.kind == "none" and policy.isolation == "required":
        found = f"refused, because this machine cannot isolate them: {missing}"
        return [Finding(name, Verdict.WARNING, found, node_checks.NAMESPACES_HINT)]
    if isolation.kind == "none":
        mend = f"unset AENV_ISOLATION; {node_checks.NAMESPACES_HINT}"
        return [Finding(name, Verdict.FAILED, f"not isolated: {missing}", mend), *rows]
    spaces = ", ".join(isolation.namespaces)
    found = f"isolated by {isolation.kind} ({spaces})" + (
        f"; missing: {missing}" if missing else ""
    )
    return [Finding(name, Verdict.WARNING if missing else Verdict.OK, found), *rows]


def kernel_memory(limits: Mapping[str, str], queue: Path = _QUEUE) -> Finding:
    """Report how much memory of the kernel process sandboxes can hold that no limit counts.

    The kernel allows as many sockets in transit for a user as a process may have open.
    """
    name = "process kernel memory"
    if "cgroup" in limits.get("memory", ""):
        return Finding(name, Verdict.OK, "counted by the control group of each sandbox")
    try:
        queue_bytes = 2 * int(queue.read_text())
    except OSError:  # hidden in a container
        queue_bytes = 2 * _USUAL_QUEUE_BYTES
    found = (
        f"up to {MAX_FILES * queue_bytes >> 20} MiB of all sandboxes together are not counted: "
        "unread data in sockets that are in transit"
    )
    return Finding(name, Verdict.WARNING, found, "set AENV_CGROUP, or lower net.core.wmem_default")


def docker_engine(settings: Settings, policy: Policy) -> list[Finding]:
    """Report what the Docker daemon separates from the node."""
    if not policy.allows_engine("docker"):
        return [Finding("docker", Verdict.OK, "the policy does not allow this engine")]
    try:
        info = asyncio.run(node_checks.docker_info(settings))
    except node_checks.CHECK_ERRORS as exc:
        found = f"no daemon answers, so there are no containers: {node_checks.line(exc)}"
        return [Finding("docker", Verdict.OK, found)]
    return [daemon(info, settings.docker_runtime), docker_socket(settings.docker_host)]


def daemon(info: Mapping[str, Any], wanted_runtime: str | None) -> Finding:
    """Judge a daemon by its answer to ``/info``: user namespaces, seccomp, the runtime's kernel."""
    from aenv_ray.engines.docker.link import has_own_kernel

    options = " ".join(map(str, info.get("SecurityOptions") or []))
    runtime = wanted_runtime or str(info.get("DefaultRuntime") or "runc")
    own_kernel = has_own_kernel((info.get("Runtimes") or {}).get(runtime) or {})
    remaps = "name=userns" in options or "name=rootless" in options
    kernel = "with its own kernel" if own_kernel else "on the kernel of the node"
    words = [
        f"runtime {runtime}, {kernel}",
        f"user namespaces: {'yes' if remaps else 'no'}",
    ]
    if "name=seccomp" not in options and not own_kernel:
        return Finding(
            "docker", Verdict.FAILED, f"{'; '.join(words)}; no seccomp profile",
            "use a daemon with seccomp, or set AENV_DOCKER_RUNTIME=runsc",
        )  # fmt: skip
    if own_kernel or remaps:
        return Finding("docker", Verdict.OK, "; ".join(words))
    mend = "set userns-remap in the daemon's configuration, or AENV_DOCKER_RUNTIME=runsc"
    return Finding("docker", Verdict.WARNING, "; ".join(words), mend)


def docker_socket(address: str) -> Finding:
    """Check that only chosen users reach the daemon, since it gives root on the node."""
    name, path = "docker socket", Path(address.removeprefix("unix://"))
    if not address.startswith("unix://"):
        mend = "use the Unix socket, or TLS with client certificates"
        return Finding(name, Verdict.FAILED, f"{address} is reached over the network", mend)
    if is_open_to_others(path):
        return Finding(name, Verdict.FAILED, f"every user may use {path}, which gives them root",
                       f"chmod o= {path}")  # fmt: skip
    return Finding(name, Verdict.OK, f"{path} is closed to other users")


def cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Finding:
    """Report whether this process has a cgroup v2 of its own; no engine requires one."""
    unified = next((p for p in (root, root / "unified") if (p / _CONTROLLERS).exists()), None)
    state = "not mounted"
    if unified is not None:
        rows = own.read_text().splitlines()
        group = unified / next((row[3:] for row in rows if row.startswith("0::")), "").lstrip("/")
        controllers = " ".join((group / _CONTROLLERS).read_text().split()) or "no controllers"
        delegated = "delegated" if os.access(group, os.W_OK) else "not delegated"
        state = f"{delegated}: {group}, {controllers}"
        if "memory" not in controllers.split():
            state += "; without the memory controller AENV_CGROUP cannot be used"
    found = f"{state}; limits of process sandboxes do not depend on it"
    return Finding("cgroup v2", Verdict.OK, found)


# --- the operator's configuration -----------------------------------------------------------------


def policy_findings(policy: Policy) -> list[Finding]:
    """Report what environments may request, and where that is more than the strict default."""
    looser = [
        f"{name}: {', '.join(sorted(more))}"
        for name in (
            "networks",
            "destinations",
            "capabilities",
            "users",
            "runtimes",
            "engines",
            "chat_models",
        )
        if (more := set(getattr(policy, name)) - set(getattr(STRICT, name)))
    ]
    limits = {
        "max_cpu": "cores",
        "max_memory_bytes": "bytes of memory",
        "max_disk_bytes": "bytes of disk",
        "max_pids": "processes",
        "max_replicas": "replicas",
        "max_warm": "warm sandboxes",
        "max_ttl_s": "seconds of TTL",
    }
    for name, unit in limits.items():
        most, strict = getattr(policy, name), getattr(STRICT, name)
        if most is None:
            looser.append(f"no limit of {unit}")
        elif most > strict:
            looser.append(f"{most:,.15g} {unit} (strict: {strict:,.15g})")
    mend = "set AENV_POLICY=strict, and allow what is needed with AENV_ALLOW_… and AENV_MAX_…"
    rows = []
    if policy == Policy(isolation=policy.isolation):
        found = "environments may request anything: the node's network, root, any image"
        rows.append(Finding("policy", Verdict.FAILED, found, mend))
    elif looser:
        found = f"more than the strict default: {'; '.join(looser)}"
        rows.append(Finding("policy", Verdict.WARNING, found, mend))
    else:
        rows.append(Finding("policy", Verdict.OK, "at most what the strict default allows"))
    if ANY in policy.images:
        found, mend = "images may come from any registry", "set AENV_ALLOW_IMAGES"
        rows.append(Finding("registries", Verdict.WARNING, found, mend))
    else:
        rows.append(Finding("registries", Verdict.OK, f"allowed: {', '.join(policy.images)}"))
    if policy.allows_engine("docker"):
        rows.append(root_sidecars(policy))
    return rows


def root_sidecars(policy: Policy) -> Finding:
    """Report which sidecars of the docker engine may be root, as the users of their images."""
    name = "root sidecars"
    if ANY in policy.root_sidecars:
        found = "sidecars of any image may run as root, whatever users the policy allows"
        return Finding(name, Verdict.WARNING, found, "set AENV_ALLOW_ROOT_SIDECARS")
    if not policy.root_sidecars:
        return Finding(name, Verdict.OK, "no image of a sidecar may choose its user")
    images = ", ".join(policy.root_sidecars)
    return Finding(name, Verdict.OK, f"those with images of {images}")


def tokens(fabric: LocalFabric | None) -> Finding:
    """Report the roles in use, and tokens that never expire."""
    from aenv_ray.cli.terminal.options import gateway, knows_gateway

    if not knows_gateway(None):
        return Finding("tokens", Verdict.OK, "no gateway is configured")
    try:
        with gateway() as client:
            rows = client.tokens()
    except AenvError as exc:
        return Finding("tokens", Verdict.WARNING, f"cannot be listed: {exc.message}")
    counts = Counter(row.role or "unknown" for row in rows)
    found = ", ".join(f"{number} {role}" for role, number in sorted(counts.items())) or "none"
    is_up_token = fabric is not None and fabric.token
    endless = [row for row in rows if row.expires_at is None and row.role != "agent"]
    if len(endless) > bool(is_up_token):
        ids = ", ".join(row.id for row in endless[:5])
        mend = "create tokens with --ttl; end one with: aenv token revoke ID"
        return Finding("tokens", Verdict.WARNING, f"{found}; without an end: {ids}", mend)
    return Finding("tokens", Verdict.OK, found)


def redis(url: str | None, password: str | None = None) -> Finding:
    """Judge the address of the hub's Redis, and whether it has a password."""
    if url is None:
        return Finding("hub's Redis", Verdict.OK, "bundled: a private socket with a password")
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.hostname or ''}"
    if not (parts.password or password) and parts.scheme != "unix":
        mend = "set a password in Redis and in AENV_REDIS_PASSWORD"
        return Finding("hub's Redis", Verdict.FAILED, f"{where} is used without a password", mend)
    is_local = is_loopback(parts.hostname or "")
    if parts.scheme not in _PRIVATE_SCHEMES and not is_local:
        mend = "use rediss://, or a private network"
        return Finding("hub's Redis", Verdict.WARNING, f"{where} is not encrypted", mend)
    return Finding("hub's Redis", Verdict.OK, where)


# --- files ----------------------------------------------------------------------------------------


def private_paths(settings: Settings, fabric: LocalFabric | None) -> list[Path]:
    """Return the files and directories that only the user of the fabric may read."""
    from aenv_ray.cli.terminal import config_file

    data, token = settings.data_dir, os.environ.get("RAY_AUTH_TOKEN_PATH")
    paths = [data / name for name in ("up.json", "hub", "artifacts", "projects", "storage")]
    paths += [
        config_file.path_in_use(),
        settings.docker_config / "config.json",
    ]
    paths.append(Path(token) if token else Path.home() / ".ray" / "auth_token")
    if settings.runtime_dir.is_dir():
        paths += settings.runtime_dir.iterdir()
    if fabric is not None and fabric.ray_temp_dir is not None:
        paths.append(fabric.ray_temp_dir)
    return paths


def files(paths: Iterable[Path]) -> Finding:
    """Check that other users can open none of the paths that exist."""
    existing = [path for path in paths if path.exists()]
    opened = [str(path) for path in existing if is_open_to_others(path)]
    if opened:
        return Finding("files", Verdict.FAILED, f"open to every user: {', '.join(opened)}",
                       f"chmod -R go= {' '.join(opened)}")  # fmt: skip
    return Finding("files", Verdict.OK, f"{len(existing)} checked, closed to other users")


def is_open_to_others(path: Path) -> bool:
    """Return whether every user can read or write a path, considering the directories above it."""
    try:
        resolved = path.resolve()
        mode = resolved.stat().st_mode
        parents = [parent.stat().st_mode for parent in resolved.parents]
    except OSError:
        return False
    return bool(mode & (stat.S_IROTH | stat.S_IWOTH)) and all(m & stat.S_IXOTH for m in parents)


# --- addresses ------------------------------------------------------------------------------------


def ray_addresses(fabric: LocalFabric | None) -> list[Finding]:
    """Report where the Ray of `aenv up`, or else any Ray of this user, accepts connections."""
    from aenv_ray.actors.ray_shell import ray_api
    from aenv_ray.cli.local import local_ray

    name = "Ray's addresses"
    is_up = fabric is not None and fabric.owns_ray
    ours = set(local_ray.processes(fabric)) if fabric is not None and is_up else set()
    rays = {
        pid: variables
        for pid, command, variables in ray_api.all_processes()
        if pid in ours or (not is_up and command and command[0].endswith(_RAYS_PROGRAMS))
    }
    if not rays:
        return [Finding(name, Verdict.OK, "this user runs no Ray on this machine")]
    opened = [
        (pid, port) for pid, ip, port in ray_api.listening() if pid in rays and not is_loopback(ip)
    ]
    if not opened:
        return [Finding(name, Verdict.OK, "only loopback")]
    # Those of `aenv up` are one Ray, and some of them overwrite their variables with their titles.
    with_token = {pid for pid, variables in rays.items() if _has_token(variables)}
    unguarded = {port for pid, port in opened if pid not in with_token}
    if is_up and with_token:
        unguarded = set()
    ports = sorted(unguarded or {port for _, port in opened})
    shown = ", ".join(map(str, ports[:6])) + (" …" if len(ports) > 6 else "")
    found = f"reachable from other machines: ports {shown}"
    if unguarded:
        mend = "start Ray with RAY_AUTH_MODE=token, and block these ports in a firewall"
        return [Finding(name, Verdict.FAILED, f"{found}, without a token", mend)]
    mend = "block these ports in a firewall, or use a private network: the token is not encrypted"
    return [Finding(name, Verdict.WARNING, f"{found}, with a token", mend)]


def _has_token(variables: Mapping[str, str]) -> bool:
    return variables.get("RAY_AUTH_MODE") == "token"


def gateway_address(fabric: LocalFabric | None) -> list[Finding]:
    """Report whether tokens for the gateway of `aenv up` travel unencrypted."""
    from aenv_ray.actors.ray_shell import ray_api

    if fabric is None:
        return []
    ports = {urlsplit(url).port for url in (fabric.url, fabric.mcp_url)}
    opened = sorted(
        {
            f"{ip}:{port}"
            for _, ip, port in ray_api.listening()
            if port in ports and not is_loopback(ip)
        }
    )
    if not opened:
        return [Finding("gateway's address", Verdict.OK, f"{fabric.url}, only on loopback")]
    mend = (
        "put a proxy that terminates TLS in front of it, have the gateway listen on loopback, and "
        "set public_url and public_mcp_url"
    )
    found = f"{', '.join(opened)} without TLS: tokens can be read on the way"
    return [Finding("gateway's address", Verdict.FAILED, found, mend)]


def not_defended(policy: Policy) -> list[Finding]:
    """Name what no configuration of the allowed engines defends against."""
    return [
        Finding(f"not defended: {engine}", Verdict.WARNING, gaps)
        for engine, gaps in _KNOWN_GAPS.items()
        if policy.allows_engine(engine)
    ]
