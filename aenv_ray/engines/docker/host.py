"""A host on its node, as every part of the docker engine needs it."""

from __future__ import annotations

from dataclasses import dataclass

from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.node.docker_client import DockerClient
from aenv_ray.ids import HostId


@dataclass(frozen=True)
class DockerHost:
    """A host, and what it shares with the other hosts of its scope on the node."""

    id: HostId
    scope: str
    """The scope, which is on the label of everything that the host creates."""
    client: DockerClient
    files: DockerFiles
