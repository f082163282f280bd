"""Finds the engines that a node can run, and words the error if no node can run an instance."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from aenv_ray.config import Settings, settings
from aenv_ray.errors import ConfigError, FabricUnavailable

_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_CONNECT_S: Final = 1.0


def node_engines() -> tuple[str, ...]:
    """Return the engines that this node can run, the preferred one first.

    A node that declares an engine in Ray runs that one. Another runs processes, containers if its
    Docker daemon listens, and pods if it is a pod itself; it prefers the engine of its settings.
    """
    from aenv_ray.actors.ray_shell import ray_api

    declared = ray_api.declared_engine()
    return (declared,) if declared else found_engines(settings())


def found_engines(given: Settings, token: Path = _TOKEN) -> tuple[str, ...]:
    """Return the engines that this machine can run, whatever its node declares.

    Args:
        given: The settings of the host.
        token: The token of a pod's service account.
    """
    found = ["process"]
    if _listens(given.docker_host):
        found.append("docker")
    if given.engine == "kubernetes" or given.pod_name is not None or token.exists():
        found.append("kubernetes")
    found.append("fake")
    return tuple(sorted(found, key=lambda name: name != given.engine))


def _listens(address: str) -> bool:
    """Return whether something listens at the address of a Docker daemon."""
    from aenv_ray.engines.node.docker_client import socket_path

    try:
        path = socket_path(address)
    except ConfigError:
        return False  # the engine needs the node's own daemon
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def engine_refusal(
    engines: Sequence[str], offered: Iterable[Sequence[str]]
) -> FabricUnavailable | None:
    """Return the error for instances that no node can run; None if one can, or there is no node.

    Args:
        engines: The engines that the instances may run on.
        offered: The engines of each node; empty for a node of which they are not known.
    """
    present = [tuple(each) for each in offered]
    if not engines or not present or any(not e or set(e) & set(engines) for e in present):
        return None
    counted = Counter(", ".join(each) for each in present)
    have = "; ".join(f"{count} with {names}" for names, count in sorted(counted.items()))
    return FabricUnavailable(
        f"no node can run instances on engine {' or '.join(engines)}; the nodes of the cluster: "
        f"{have}",
        hint="choose an engine that the nodes have, or add a node with one of these. A project "
        "with a container image, a second container or network internet does not run on engine "
        "process",
    )
