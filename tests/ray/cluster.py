"""One local Ray for all tests of a process that need one, and what it runs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Final

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.engines.node.directory import node_directory
from tests.ray.faults import eventually, eventually_empty, processes_of, settled, without

FRUGAL: Final = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "3600",
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",
    "RAY_enable_metrics_collection": "0",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "3600",
    "SPT_NOENV": "1",
}
"""A Ray's variables: no workers that nobody asked for, no logs and figures that nobody reads, and
agents that keep the variables by which `processes_of` finds them."""
FRUGAL_HEAD: Final = {"include_log_monitor": False, "no_monitor": True}
"""A head's parameters: nobody reads its logs, and it gets no nodes by itself."""
SHARED: Final = contextlib.ExitStack()
"""Ends the Ray that the tests of this process share."""
SERVING: Final = contextlib.ExitStack()
"""Ends the gateway that tests of services share, which runs on that Ray."""


@dataclass(frozen=True)
class Cluster:
    """The local Ray of these tests."""

    root: Path
    address: str
    node_dir: Path

    def sandboxes(self) -> list[int]:
        """Return the pids of all sandbox processes, from the process table."""
        return settled(lambda: live_processes(self.node_dir))

    def appeared(self, before: list[int], count: int = 1) -> list[int]:
        """Return the pids of the `count` sandboxes that are new since `before`.

        A process that a template forks in reserve is not known as such at once.
        """
        found: list[int] = []

        def are_there() -> bool:
            found[:] = without(live_processes(self.node_dir), before)
            return len(found) == count

        eventually(are_there, what=lambda: f"not {count} but {found}")
        return found

    def traces(self) -> list[str]:
        """Return what instances leave on disk while they live: sockets, logs, records."""
        found = [f"s/{p.name}" for p in (self.node_dir / "s").glob("*")]
        found += [f"records/{p.name}" for p in (self.node_dir / "records").glob("*.json")]
        # A live instance has a socket from the start, and a log from its first output on.
        logs = {p.name for p in (self.node_dir / "log").glob("*")}
        logs -= {p.name for p in (self.node_dir / "s").glob("*")}
        return found + [f"log/{name}" for name in logs if not name.startswith("template-")]


@contextlib.contextmanager
def local_cluster() -> Iterator[Cluster]:
    """Run a Ray with its own directories; afterwards no process of it is left."""
    root = Path(tempfile.mkdtemp(prefix="aenv-t", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL"):
            patch.delenv(name, raising=False)
        patch.delenv("DUMMY_INSTANCE_IP", raising=False)
        patch.setenv("AENV_RUNTIME_DIR", str(root / "r"))
        patch.setenv("AENV_DATA_DIR", str(root / "d"))
        patch.setenv("AENV_ALLOW_NETWORKS", "*")  # the probe uses the network of the node
        patch.setenv("DOCKER_CONFIG", str(root / "docker"))
        patch.setenv("RAY_TMPDIR", str(root))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in FRUGAL.items():
            patch.setenv(name, value)
        settings.cache_clear()
        import ray
        from ray._private.parameter import RayParams

        from aenv_ray.actors.ray_shell import ray_api

        # `ray.init` has no names for them.
        patch.setattr(RayParams, "__init__", partialmethod(RayParams.__init__, **FRUGAL_HEAD))
        context = ray.init(
            address="local",
            num_cpus=4,
            namespace=ray_api.NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            _system_config=dict(ray_api.SYSTEM_CONFIG),
        )
        aenv_ray.init()
        node_dir = node_directory(settings().runtime_dir, ray_api.session_scope())
        try:
            yield Cluster(root, context.address_info["gcs_address"], node_dir)
        finally:
            aenv_ray.shutdown()
            ray.shutdown()
    settings.cache_clear()
    eventually_empty(lambda: live_processes(node_dir))
    eventually_empty(lambda: processes_of(root), 60.0)
    shutil.rmtree(root, ignore_errors=True)
