"""Names of a scope's containers and volumes; an instance's files have its container's name."""

from __future__ import annotations

from typing import Final

from aenv_ray.engines.node.directory import short_name

_SIDECAR: Final = "-sidecar"


def docker_scope(scope: str) -> str:
    """Return the docker engine's part of a node's scope."""
    return f"{scope}/docker"


def container_name(scope: str, instance_id: str) -> str:
    """Return the name of an instance's main container."""
    return f"aenv-{short_name(f'{scope}/{instance_id}')}"


def sidecar_name(name: str) -> str:
    """Return the name of the sidecar of a main container."""
    return f"{name}{_SIDECAR}"


def main_name(name: str) -> str:
    """Return the name of the main container, given its own name or that of its sidecar."""
    return name.removesuffix(_SIDECAR)


def volume_name(name: str) -> str:
    """Return the name of the volume that a main container shares with its sidecar."""
    return f"{name}-shared"
