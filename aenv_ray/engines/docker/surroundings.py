"""What a container gets that its spec does not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.node.local_storage import LocalDirectory
from aenv_ray.project.config import NetworkMode


@dataclass(frozen=True)
class SecondSurroundings:
    """What the second container of an instance gets."""

    name: str
    image_id: str
    image_user: str
    image_path: str
    image_directory: str
    kit: Path
    run_directory: Path


@dataclass(frozen=True)
class Surroundings:
    """What a container gets that its spec does not say."""

    scope: str
    host_id: str
    directory: Path
    """Of the scope; on a label, so that any janitor finds who looks after a container."""
    name: str
    image_id: str
    image_user: str
    """``USER`` of the image; "" for none."""
    image_path: str
    """``PATH`` of the image; "" for none."""
    kit: Path | None
    """The runtime for this image, on this node; None when the image carries it."""
    run_directory: Path
    etc_directory: Path
    """Of files that the daemon does not write where it does nothing for the network."""
    project_dir: Path
    network: str
    """What the daemon calls the network to join: ``none``, ``host``, or a name."""
    network_mode: NetworkMode = NetworkMode.NONE
    image_directory: str = ""
    """``WORKDIR`` of the image; "" for none."""
    serving: Serving = Serving.RUNTIME
    absence: str = ""
    """Why it has no tools, where it has none."""
    server: tuple[str, ...] = ()
    """What starts the image's own server."""
    second: SecondSurroundings | None = None
    dns: tuple[str, ...] = ()
    """Resolvers instead of the node's."""
    resolver_file: Path | None = None
    """Instead of the container's; None for the daemon's own, whose resolver is on the loopback."""
    dns_options: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """``name:address`` of what it knows without a resolver."""
    allowed: tuple[str, ...] = ()
    """What it reaches, for people, where that is a list."""
    runtime: str = ""
    """The OCI runtime; "" for the daemon's default."""
    storage: LocalDirectory | None = None
    """What of it outlives it."""
    has_own_kernel: bool = False
    """The OCI runtime gives containers a kernel of their own."""
    has_seccomp: bool = True
    has_user_namespace: bool = False
    has_quota: bool = False
    """The daemon can limit what a container writes to its image's directories."""

    @property
    def is_unattached(self) -> bool:
        """Whether the daemon does nothing for its network, and the OCI runtime makes the loopback.

        One that gives it a kernel of its own may leave the loopback to the daemon.
        """
        return self.network_mode is NetworkMode.NONE and not self.has_own_kernel
