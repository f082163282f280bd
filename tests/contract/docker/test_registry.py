"""Push to and pull from a real registry, with and without a login."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray.cli.main import main
from aenv_ray.config import settings
from aenv_ray.engines.docker.engine import DockerEngine
from aenv_ray.engines.images import registry as image_registry
from aenv_ray.engines.images.credentials import Credentials
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, eventually, execute, value_of, write_project
from tests.conftest import require, without_rays_words
from tests.contract.docker.docker_node import (
    DockerNode,
    bare_project,
    data_dir,
    docker,
    small_image,
)  # fmt: skip
from tests.contract.docker.registry import (
    PASSWORD,
    PROGRAM,
    Gate,
    Registry,
    keep_login,
    log_in,
    push_new,
)

pytestmark = pytest.mark.docker

_TOOL = (
    "from aenv_ray.runtime import register_tool\n@register_tool\ndef six() -> int:\n    return 6\n"
)


def _registry(*, with_login: bool) -> Iterator[Registry]:
    require("registry", PROGRAM is not None, "docker-registry is not installed")
    registry = Registry(with_login=with_login)
    yield registry
    listed = docker("images", "--digests", "--format", "{{.Repository}} {{.ID}}").splitlines()
    found = {line.split()[1] for line in listed if line.startswith(f"{registry.name}/")}
    if found:
        docker("rmi", "--force", *found, check=False)
    registry.end()


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    """Yield a registry without login."""
    yield from _registry(with_login=False)


@pytest.fixture(scope="module")
def closed_registry() -> Iterator[Registry]:
    """Yield a registry that requires a login."""
    yield from _registry(with_login=True)


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for Docker's configuration, without logins."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    monkeypatch.setenv("AENV_DATA_DIR", str(data_dir()))
    settings.cache_clear()
    yield tmp_path / "docker-config"
    settings.cache_clear()


@pytest.fixture
async def bench(
    docker_node: DockerNode, docker_config: Path, offer: object, tmp_path: Path
) -> AsyncIterator[Bench]:
    del offer  # its images are removed after these containers
    engine = _engine(docker_node, docker_config)
    yield Bench(engine, tmp_path)
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    await engine.close()
    await eventually(lambda: not docker_node.left_over(), "nothing is left")


def _engine(node: DockerNode, docker_config: Path) -> DockerEngine:
    return node.engine(HostId(f"host-{uuid.uuid4().hex[:8]}"), docker_config=docker_config)


@pytest.fixture
def offer(tmp_path: Path) -> Iterator[Callable[[Registry], str]]:
    """Yield a function that pushes a unique image and returns its name in the registry."""
    made = []

    def push(registry: Registry) -> str:
        path = f"tests/{uuid.uuid4().hex[:8]}:1"
        reference = f"{registry.name}/{path}"
        made.append(push_new(reference, 256 * 1024, tmp_path))
        return path

    yield push
    for image in made:
        docker("rmi", "--force", image, check=False)  # it may not have been pulled


def build(project: Path, registry: Registry, *options: str) -> int:
    """Run ``aenv build`` with a unique repository."""
    return main(["build", "-w", str(project), "-r", registry.name, "-s", "tests", *options])


def write(directory: Path, dockerfile: str) -> Path:
    config = {
        "name": f"pushed-{uuid.uuid4().hex[:8]}",
        "deployConfig": {"network": "none"},
        "buildConfig": {"dockerfile": "./Dockerfile"},
    }
    project = write_project(directory, {"tools.py": _TOOL}, config)
    (project / "Dockerfile").write_text(dockerfile)
    return project


async def test_an_instance_runs_the_pushed_image_on_a_node_that_did_not_build_it(
    tmp_path: Path,
    closed_registry: Registry,
    docker_config: Path,
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_in(docker_config, closed_registry.name)
    project = write(tmp_path / "p", f"FROM {small_image()}\nRUN echo built > /built\n")
    options = ("-t", "one", "-t", "two", "--push")
    assert await asyncio.to_thread(build, project, closed_registry, *options) == 0
    out, err = map(without_rays_words, capsys.readouterr())
    reference, digest = out.split()
    repository = reference.partition(":one")[0]
    assert digest.startswith(f"{repository}@sha256:")
    (noted,) = json.loads((project / "config.json").read_text())["artifacts"]
    assert noted == {"type": "image", "content": reference, "digest": digest}
    assert f"pushing {repository}:two" in err
    assert "layers" in err
    docker("rmi", "--force", docker("inspect", "--format", "{{.Id}}", reference))
    sandbox = await bench.start(project)
    assert await value_of(sandbox, "six") == 6
    assert sandbox.start_mode.endswith("with its own runtime")
    assert docker("images", "--digests", "--format", "{{.Digest}}", repository) in digest


async def test_the_error_for_a_push_without_a_login_says_how_to_log_in(
    tmp_path: Path,
    closed_registry: Registry,
    docker_config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = write(tmp_path / "p", f"FROM {small_image()}\n")
    before = (project / "config.json").read_bytes()
    assert await asyncio.to_thread(build, project, closed_registry, "--push") == 1
    err = capsys.readouterr().err
    assert "requires a login" in err
    assert f"docker login {closed_registry.name}" in err
    assert (project / "config.json").read_bytes() == before
    log_in(docker_config, closed_registry.name, "another word")
    assert await asyncio.to_thread(build, project, closed_registry, "--push") == 1
    err = capsys.readouterr().err
    assert "does not accept this login" in err
    assert "another word" not in err
    assert (project / "config.json").read_bytes() == before
    log_in(docker_config, closed_registry.name)
    assert await asyncio.to_thread(build, project, closed_registry, "--push") == 0
    assert f"{closed_registry.name}/tests/" in (project / "config.json").read_text()


async def test_a_base_image_is_pulled_with_the_login(
    tmp_path: Path,
    closed_registry: Registry,
    docker_config: Path,
    offer: Callable[[Registry], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The image has no Python: only the build of the Dockerfile matters here."""
    base = f"{closed_registry.name}/{offer(closed_registry)}"
    project = write(tmp_path / "p", f"FROM {base}\n")
    assert await asyncio.to_thread(build, project, closed_registry) == 1
    err = capsys.readouterr().err
    assert base in err
    assert "docker login" in err
    log_in(docker_config, closed_registry.name)
    assert await asyncio.to_thread(build, project, closed_registry) == 1
    assert "has no python3 that starts" in capsys.readouterr().err


@pytest.mark.parametrize("kept_by", ["file", "helper"])
async def test_a_pull_uses_this_nodes_login_and_never_shows_it(
    closed_registry: Registry,
    docker_config: Path,
    tmp_path: Path,
    bench: Bench,
    offer: Callable[[Registry], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept_by: str,
) -> None:
    """Invariant 10."""
    caplog.set_level(logging.DEBUG)
    reference = f"{closed_registry.name}/{offer(closed_registry)}"
    project = bare_project(bench, reference)
    with pytest.raises(
        SandboxStartFailed, match="requires a login and this node has none"
    ) as raised:
        await bench.start(project)
    assert f"docker login {closed_registry.name}" in str(raised.value.hint)
    assert str(docker_config / "config.json") in str(raised.value.hint)
    if kept_by == "file":
        log_in(docker_config, closed_registry.name, "another word")
        with pytest.raises(SandboxStartFailed, match="does not accept this node's login"):
            await bench.start(project)
        log_in(docker_config, closed_registry.name)
    else:
        keep_login(docker_config, tmp_path / "programs", closed_registry.name)
        with pytest.raises(SandboxStartFailed) as raised:
            await bench.start(project)
        assert "docker-credential-tests" in str(raised.value.hint)
        monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=":")
    sandbox = await bench.start(project)
    assert (await execute(sandbox, "echo there")).text() == "there\n"
    told = f"{caplog.text} {[record.args for record in caplog.records]}"
    assert f"pulled image {reference}" in told
    header = (await Credentials(docker_config).login(closed_registry.name)).header
    for secret in (PASSWORD, "another word", header):
        assert secret not in told


async def test_a_missing_image_and_an_unreachable_registry_are_different_errors(
    registry: Registry, bench: Bench
) -> None:
    with pytest.raises(SandboxStartFailed, match="it does not exist"):
        await bench.start(bare_project(bench, f"{registry.name}/tests/nothing:1"))
    nobody = "localhost:1"  # no service listens there
    with pytest.raises(SandboxStartFailed, match=f"registry {nobody} cannot be reached"):
        await bench.start(bare_project(bench, f"{nobody}/tests/nothing:1"))


async def test_concurrent_creates_on_a_node_share_one_pull(
    registry: Registry,
    docker_node: DockerNode,
    docker_config: Path,
    bench: Bench,
    tmp_path: Path,
    offer: Callable[[Registry], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    path = offer(registry)
    other = Bench(_engine(docker_node, docker_config), tmp_path / "other")
    project = bare_project(bench, f"{registry.name}/{path}")
    benches = [bench, bench, other, other]
    async with asyncio.TaskGroup() as group:
        for one in benches:
            group.create_task(one.start(project))
    await other.engine.stop([sandbox.instance_id for sandbox in await other.engine.running()])
    await other.engine.close()
    assert caplog.text.count("pulling image") == 1
    assert registry.requests("GET", f"{path.partition(':')[0]}/blobs/") <= 2  # config and layer
    caplog.clear()
    missing = bare_project(bench, f"{registry.name}/tests/nothing:1")
    outcomes = await bench.engine.start_many([bench.spec(missing) for _ in range(4)])
    assert all(isinstance(outcome, SandboxStartFailed) for outcome in outcomes)
    assert caplog.text.count("pulling image") == 1


async def test_a_pull_from_a_registry_that_falls_silent_fails(
    registry: Registry,
    bench: Bench,
    offer: Callable[[Registry], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9."""
    monkeypatch.setattr(image_registry, "SILENCE_S", 1.0)
    gate = Gate(registry)
    path = offer(registry)
    async with gate.serve(free_bytes=64 * 1024):
        with pytest.raises(SandboxStartFailed, match="the daemon reported nothing for 1 s"):
            await bench.start(bare_project(bench, f"{gate.name}/{path}"))


async def test_an_image_that_was_removed_is_pulled_again(
    registry: Registry, bench: Bench, offer: Callable[[Registry], str]
) -> None:
    reference = f"{registry.name}/{offer(registry)}"
    project = bare_project(bench, reference)
    sandbox = await bench.start(project)
    await bench.engine.stop([sandbox.instance_id])
    docker("rmi", "--force", reference)
    with pytest.raises(SandboxStartFailed, match="No such image"):
        await bench.start(project)
    await bench.start(project)


async def test_a_pull_ends_when_the_last_create_that_waits_for_it_is_cancelled(
    registry: Registry,
    bench: Bench,
    offer: Callable[[Registry], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 11."""
    path = offer(registry)
    gate = Gate(registry)
    async with gate.serve(free_bytes=64 * 1024):
        reference = f"{gate.name}/{path}"
        project = bare_project(bench, reference)
        first, second = (asyncio.create_task(bench.start(project)) for _ in range(2))
        await gate.stuck.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert caplog.text.count("pulling image") == 1
        assert not docker("images", "--quiet", reference)
        gate.open()
        sandbox = await bench.start(project)
        assert caplog.text.count("pulling image") == 2
        assert (await execute(sandbox, "echo there")).text() == "there\n"
        docker("rmi", "--force", reference)
