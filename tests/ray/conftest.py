"""Instances on the local Ray of these tests, and proof that nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.client import Environment
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.config import settings
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.hub.records import Role
from tests.contract.processes import signal_all
from tests.ray.cluster import FRUGAL, SERVING, SHARED, Cluster
from tests.ray.faults import (
    PROBE,
    Driver,
    Witness,
    eventually_empty,
    processes_of,
    without,
)
from tests.ray.gateway.data_gateway import SINK, Door, GatewayBench
from tests.ray.services.services import ServiceGateway, a_gateway

Named = Callable[[Path], str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a local Ray."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)


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
    for of_the_module in ("env", "door"):
        if of_the_module in request.fixturenames:
            request.getfixturevalue(of_the_module)
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
def told(make: Callable[..., Any], witness: Witness) -> Callable[..., Any]:
    """Create instances that speak to the witness."""
    return lambda **options: make(environment_variables=witness.variables, **options)


@pytest.fixture
def driver(cluster: Cluster) -> Iterator[Callable[[str], Driver]]:
    """Start drivers that join the cluster of these tests."""
    with contextlib.ExitStack() as started:

        def start(source: str) -> Driver:
            made = Driver(source, {"RAY_ADDRESS": cluster.address})
            started.callback(made.close)
            return made

        yield start


@pytest.fixture
def alone(short_dir: Path) -> Iterator[Callable[..., Driver]]:
    """Start drivers with a Ray of their own, `inside` a command that gives them namespaces."""
    variables: dict[str, str | None] = {
        **FRUGAL,
        "RAY_ADDRESS": None,
        "RAY_TMPDIR": str(short_dir),
        "AENV_RUNTIME_DIR": str(short_dir / "r"),
        "AENV_DATA_DIR": str(short_dir / "d"),
    }
    with contextlib.ExitStack() as started:

        def start(source: str, inside: Sequence[str] = ()) -> Driver:
            made = Driver(source, variables, inside)
            started.callback(made.close)
            return made

        yield start


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="aenv-a", dir="/tmp"))
    yield path
    signal_all(processes_of(path))  # Ray's own agents outlive a killed raylet by half a minute
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


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[GatewayBench]:
    """Two replicas of a gateway."""
    del cluster
    root = Path(tempfile.mkdtemp(prefix="aenv-g", dir="/tmp"))
    gateway = GatewayBench(root)
    yield gateway
    gateway.close()
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def door(gateway: GatewayBench) -> Iterator[Door]:
    """An instance of everything behind them, for the tests that leave it as it is."""
    import ray

    handle = aenv_ray.create(SINK, actor="shared")
    yield Door(gateway, handle)
    ray.get(handle.release.remote(), timeout=60)


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the gateway of the services' tests after the last of them."""
    if "service_gateway" not in getattr(item, "fixturenames", []):
        SERVING.close()


@pytest.fixture(scope="session")
def service_gateway(cluster: Cluster) -> ServiceGateway:
    """Return what the modules that test services share: Serve starts once."""
    del cluster
    SHARED.callback(SERVING.close)
    return SERVING.enter_context(a_gateway())


# --- Environment, over Ray and over a gateway ----------------------------------------------------


@pytest.fixture(scope="module", params=["ray", "local", "gateway"])
def way(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """How instances are reached: by Ray, also directly, or by a gateway."""
    del cluster
    if request.param == "ray":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AENV_LOCAL_DOOR", "0")
            settings.cache_clear()
            yield "ray"
        settings.cache_clear()
        return
    if request.param == "local":
        with every_call_direct() as doors:
            yield "local"
        assert any(doors)  # else nothing was tested
        return
    gateway: GatewayBench = request.getfixturevalue("gateway")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_SYSTEM_URL", gateway.url)
        patch.setenv("AENV_API_KEY", gateway.token(Role.PUBLISHER))
        yield "gateway"


@contextlib.contextmanager
def every_call_direct() -> Iterator[list[bool]]:
    """Connect to each sandbox before the first call; yields whether each call was direct."""
    send = AsyncEnvHandle._send
    were_direct: list[bool] = []

    def connect_and_send(handle: AsyncEnvHandle, message: bytes) -> Awaitable[Any]:
        async def run() -> Any:
            were_direct.append(await handle.connect_directly())
            return await send(handle, message)

        return run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncEnvHandle, "_send", connect_and_send)
        yield were_direct


@pytest.fixture
def named(way: str, request: pytest.FixtureRequest) -> Named:
    """Return how a project is named: over Ray by its path, at a gateway by its name."""

    def name(path: Path) -> str:
        if way != "gateway":
            return str(path)
        gateway: GatewayBench = request.getfixturevalue("gateway")
        gateway.projects[path.name] = path
        return path.name

    return name


@pytest.fixture
def live(way: str, make: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    """Return an instance that was made by Ray, and that the gateway accounts for."""
    handle = make()
    if way == "gateway":
        request.getfixturevalue("gateway").admit(handle, "ada")
    return handle


@pytest.fixture
def probe(named: Named) -> str:
    """Return how the probe project is named."""
    return named(PROBE)


@pytest.fixture
def shared(probe: str) -> Callable[..., Environment]:
    """Make environments on a shared host: the density is not the point here."""

    def make(name: str = probe, **options: Any) -> Environment:
        return Environment(name, actor="shared", **options)

    return make
