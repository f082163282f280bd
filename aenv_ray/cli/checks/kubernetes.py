"""The checks of the kubernetes engine, against the real API.

Only the service account of Ray's workers may create pods. Elsewhere, for example on the head, the
checks run on a worker.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final

from aenv_ray.cli.checks import node as node_checks
from aenv_ray.config import Settings
from aenv_ray.errors import AenvError
from aenv_ray.findings import Finding, Verdict

if TYPE_CHECKING:
    from aenv_ray.engines.base import Engine, Sandbox
    from aenv_ray.engines.kubernetes.client import KubernetesClient

ENGINE: Final = "engine kubernetes"
_NETWORK: Final = "pods' network"
_LABEL: Final = ("aenv-ray.io/engine", "kubernetes")
_TRY_S: Final = 240.0
_SCHEDULE_S: Final = 60.0
_REACH_S: Final = 5.0
_REACH: Final = "import socket; socket.create_connection(({address!r}, {port}), {wait_s})"
_INSIDE_HINT: Final = (
    "run it in the head: kubectl exec --namespace aenv HEAD -- aenv doctor; elsewhere, run: "
    "aenv cluster doctor"
)
_POLICIES_HINT: Final = "apply the policies in clusters/kuberay/base/network-policies.yaml"
_PLUGIN_HINT: Final = (
    "use a network plugin that enforces NetworkPolicies, such as Calico or Cilium; until then an "
    "environment can reach Ray"
)


def applies(settings: Settings) -> bool:
    """Return whether instances are pods here, or this process runs in a pod."""
    engines = {settings.engine, *settings.joining_engines}
    return "kubernetes" in engines or settings.pod_name is not None


def engine(settings: Settings) -> list[Finding]:
    """Check the kubernetes engine, in this pod or on a worker; blocks."""
    if settings.pod_name is not None:
        return look_here()
    if settings.ray_address is None:
        found = "this is not a pod of a Ray cluster, and RAY_ADDRESS is not set"
        return [Finding(ENGINE, Verdict.FAILED, found, _INSIDE_HINT)]
    from aenv_ray.actors.ray_shell.remote_tasks import on_a_worker

    try:
        return on_a_worker(look_here, _LABEL, _TRY_S + _SCHEDULE_S)
    except AenvError as exc:
        return [Finding(ENGINE, Verdict.FAILED, exc.message, exc.hint or "")]


def look_here() -> list[Finding]:
    """Check the kubernetes engine with the service account of this process's pod; blocks."""
    from aenv_ray.config import settings
    from aenv_ray.engines.kubernetes.client import KubernetesClient

    return asyncio.run(examine(settings(), KubernetesClient(settings().kubernetes_namespace)))


async def examine(settings: Settings, client: KubernetesClient) -> list[Finding]:
    """Check permissions, start an instance, and check what it can reach."""
    from aenv_ray.engines.kubernetes.client import ApiRefused

    try:
        missing = await _missing(client)
        if missing:
            words = ", ".join(missing)
            found = f"the service account of {socket.gethostname()} may not: {words}"
            mend = f"grant it in a Role of namespace {client.namespace}, as clusters/kuberay does"
            return [Finding(ENGINE, Verdict.FAILED, found, mend)]
        begun = time.monotonic()
        async with node_checks.tried(_engine(settings, client), _TRY_S) as sandbox:
            took_s = time.monotonic() - begun
            network = await _network(sandbox)
            found = f"works in namespace {client.namespace}, {sandbox.start_mode}, {took_s:.1f} s"
        return [Finding(ENGINE, Verdict.OK, found), network]
    except AenvError as exc:
        return [Finding(ENGINE, Verdict.FAILED, exc.message, exc.hint or "")]
    except ApiRefused as exc:
        return [Finding(ENGINE, Verdict.FAILED, f"the Kubernetes API refuses: {exc.message}")]
    except (OSError, TimeoutError) as exc:
        return [Finding(ENGINE, Verdict.FAILED, f"{type(exc).__name__}: {exc}")]
    finally:
        await client.close()


async def _missing(client: KubernetesClient) -> list[str]:
    """Return the permissions of the engine that this service account lacks."""
    from aenv_ray.engines.kubernetes.permissions import Access

    words = []
    for access in Access:
        if not await client.may(access):
            group = f".{access.value.group}" if access.value.group else ""
            words.append(f"{access.value.verb} {access.value.resource}{group}")
    return words


def _engine(settings: Settings, client: KubernetesClient) -> Engine:
    from aenv_ray.engines.kubernetes.engine import KubernetesEngine
    from aenv_ray.engines.kubernetes.settings import PodSettings
    from aenv_ray.ids import HostId

    return KubernetesEngine(
        HostId(f"doctor-{secrets.token_hex(4)}"), runtime_dir=settings.runtime_dir,
        data_dir=settings.data_dir, scope="doctor", settings=PodSettings.of(settings),
        client=client, schedule_s=_SCHEDULE_S,
    )  # fmt: skip


async def _network(sandbox: Sandbox) -> Finding:
    """Check that an instance without network cannot reach this pod."""
    from aenv_ray.actors.calls import wire

    for word in sandbox.isolation.missing:
        if word.startswith("network: "):
            return Finding(_NETWORK, Verdict.WARNING, word.partition(": ")[2], _POLICIES_HINT)
    try:
        address = _own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
    except OSError as exc:
        return Finding(_NETWORK, Verdict.WARNING, f"cannot be checked from here: {exc}")
    with listener:
        port = listener.getsockname()[1]
        code = _REACH.format(address=address, port=port, wait_s=_REACH_S)
        params = {"arguments": {"command": ["python3", "-c", code]},
                  "_meta": {"aenv/timeout_s": 4 * _REACH_S}}  # fmt: skip
        answer = await sandbox.request("aenv/exec", params, deadline_s=8 * _REACH_S)
    if wire.decode("aenv/exec", answer).exit_code == 0:
        found = "NetworkPolicies exist, but nothing enforces them"
        return Finding(_NETWORK, Verdict.WARNING, found, _PLUGIN_HINT)
    return Finding(_NETWORK, Verdict.OK, "an instance without network cannot reach Ray pods")


def _own_address() -> str:
    """Return this pod's address in the cluster network, without sending anything."""
    api = os.environ.get("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    family = socket.AF_INET6 if ":" in api else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((api, 9))
        return str(sock.getsockname()[0])
