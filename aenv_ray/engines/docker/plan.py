"""What a container is created from besides its `SandboxSpec`; the planner fills it in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aenv_ray.engines.docker.host import DockerHost
from aenv_ray.engines.docker.networks import ContainerNetwork
from aenv_ray.engines.images.node_images import NodeImage
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.node.local_storage import LocalDirectory
from aenv_ray.project.config import NetworkMode

DISK_BYTES: Final = 16 << 30
"""What a container may write to its image's directories if nothing else is said."""


@dataclass(frozen=True)
class Program:
    """What answers the calls of an instance."""

    serving: Serving = Serving.RUNTIME
    bundle: Path | None = None
    """The runtime for this image, on the node; None if the image carries it."""
    lack: str = ""
    """Why the instance has no tools; "" if it has."""
    server: tuple[str, ...] = ()
    """Command of the image's own server, for `Serving.PUBLIC`."""


@dataclass(frozen=True)
class OciRuntime:
    """The program that runs a container for the daemon."""

    name: str = ""
    """"" for the daemon's default."""
    has_own_kernel: bool = False
    """Its containers do not run on the node's kernel (gVisor, a virtual machine)."""


@dataclass(frozen=True)
class DaemonFeatures:
    """What a daemon can do."""

    seccomp: bool = True
    user_namespaces: bool = False
    disk_quota: bool = False
    """It can limit what a container writes to its image's directories."""
    memory_bytes: int = 0
    """Memory of its machine; 0 if it does not tell."""


@dataclass(frozen=True)
class SidecarPlan:
    """What the sidecar of an instance is created from."""

    name: str
    image: NodeImage
    bundle: Path

    @property
    def user(self) -> str:
        """Its user: that of its image, to whom the image's files belong, mostly root."""
        return self.image.user or "0:0"


@dataclass(frozen=True)
class ContainerPlan:
    """What the main container of an instance is created from."""

    name: str
    host: DockerHost
    image: NodeImage
    program: Program
    network: ContainerNetwork
    project_dir: Path
    runtime: OciRuntime = OciRuntime()
    daemon: DaemonFeatures = DaemonFeatures()
    disk_bytes: int = DISK_BYTES
    """The limit of writes to the image's directories, if the project names none."""
    storage: LocalDirectory | None = None
    sidecar: SidecarPlan | None = None

    @property
    def is_offline(self) -> bool:
        """Whether the daemon sets up no network at all, not even the loopback.

        A runtime with its own kernel may need the daemon to set up the loopback.
        """
        return self.network.mode is NetworkMode.NONE and not self.runtime.has_own_kernel
