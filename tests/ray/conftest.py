"""One local Ray with directories of its own for all tests here, and proof that nothing is left."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.config import settings
from aenv_ray.engines.census import live_processes
from aenv_ray.engines.launcher_client import node_directory
from tests.ray.faults import (
    PROBE,
    Driver,
    Witness,
    eventually,
    eventually_empty,
    kill,
    processes_of,
    settled,
    without,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a local Ray."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)


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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    root = Path(tempfile.mkdtemp(prefix="aenv-t", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "AENV_ENGINE", "AENV_ISOLATION", "AENV_SYSTEM_URL"):
            patch.delenv(name, raising=False)
        patch.delenv("DUMMY_INSTANCE_IP", raising=False)
        patch.setenv("AENV_RUNTIME_DIR", str(root / "r"))
        patch.setenv("AENV_DATA_DIR", str(root / "d"))
        patch.setenv("DOCKER_CONFIG", str(root / "docker"))
        patch.setenv("RAY_TMPDIR", str(root))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        settings.cache_clear()
        import ray

        from aenv_ray.actors import ray_api

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


@pytest.fixture(params=["shared", "dedicated"])
def density(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["shared", "dedicated"])
def env(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    """One probe instance for the tests of a module that leave it as it is, at each density."""
    del cluster
    import ray

    handle = aenv_ray.create(PROBE, actor=request.param)
    yield handle
    ray.get(handle.release.remote(), timeout=60)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Invariant 3: a test that made instances leaves no process and no file of theirs."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    if "env" in request.fixturenames:
        request.getfixturevalue("env")
    processes, traces = live_processes(cluster.node_dir), cluster.traces()
    yield
    eventually_empty(lambda: without(live_processes(cluster.node_dir), processes))
    eventually_empty(lambda: without(cluster.traces(), traces))


@pytest.fixture
def make(cluster: Cluster, nothing_left: None) -> Iterator[Callable[..., Any]]:
    """Create instances of the probe project, by default shared; released after the test."""
    del cluster, nothing_left
    import ray

    made: list[Any] = []

    def create(environment: str | Path = PROBE, **options: Any) -> Any:
        handle = aenv_ray.create(environment, **{"actor": "shared", **options})
        made.append(handle)
        return handle

    yield create
    ray.get([handle.release.remote() for handle in made], timeout=60)


@pytest.fixture
def witness() -> Iterator[Witness]:
    found = Witness()
    yield found
    found.close()


@pytest.fixture
def driver(cluster: Cluster) -> Iterator[Callable[..., Driver]]:
    """Start drivers that join the cluster of these tests, or with `alone` start their own."""
    started: list[Driver] = []

    def start(source: str, *, alone: Path | None = None) -> Driver:
        variables: dict[str, str | None] = {"RAY_ADDRESS": cluster.address}
        if alone is not None:
            variables = {
                "RAY_ADDRESS": None,
                "RAY_TMPDIR": str(alone),
                "AENV_RUNTIME_DIR": str(alone / "r"),
                "AENV_DATA_DIR": str(alone / "d"),
            }
        started.append(Driver(source, variables))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="aenv-a", dir="/tmp"))
    yield path
    for pid in processes_of(path):  # Ray's own agents outlive a killed raylet by half a minute
        with contextlib.suppress(ProcessLookupError):
            kill(pid)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Path]:
    """Write a project of one module and return its directory."""

    def write(source: str, network: str = "none", config: str | None = None) -> Path:
        root = tmp_path / "written"
        (root / "src").mkdir(parents=True, exist_ok=True)
        usual = {"name": "written", "deployConfig": {"network": network}}
        (root / "config.json").write_text(json.dumps(usual) if config is None else config)
        (root / "src" / "tools.py").write_text(source)
        return root

    return write
