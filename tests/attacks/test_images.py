"""A publisher names an image: of a server of the private network, or with a user that is root."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError, PolicyRefused, SandboxStartFailed
from aenv_ray.policy import STRICT, repository_of
from aenv_ray.project.config import Artifact
from aenv_ray.testing.contract_bench import Bench, execute, value_of
from tests.contract.docker.docker_node import DockerNode, base_image, docker, shell_image
from tests.contract.engines import engine_on

pytestmark = pytest.mark.docker

SECRET = "internal-secret-of-this-server"


class Internal(ThreadingHTTPServer):
    """A server that is no registry, and what it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Internal

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = f'{{"errors":[{{"code":"UNKNOWN","message":"{SECRET}"}}]}}'.encode()
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


@pytest.fixture
def internal() -> Iterator[Internal]:
    with Internal() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
async def strict(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench whose policy is that behind a gateway."""
    async with engine_on(docker_node, policy=lambda: STRICT) as engine:
        yield Bench(engine, tmp_path)


def project_of(bench: Bench, image: str) -> Path:
    return bench.contract_project({"network": "none", "container": {"image": image}})


async def test_the_error_of_a_pull_quotes_no_answer(dockered: Bench, internal: Internal) -> None:
    """Invariant 7: what a server answers to the node is not for the publisher."""
    with pytest.raises(SandboxStartFailed, match="cannot be pulled") as raised:
        await dockered.start(project_of(dockered, f"{internal.address}/some/thing:1"))
    assert internal.asked, "the daemon asked it"
    assert SECRET not in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize("where", ["image", "artifact", "sidecar"])
async def test_an_address_of_the_private_network_is_never_asked(
    strict: Bench, internal: Internal, where: str
) -> None:
    """Invariant 7: not as an image, as a built image or as a sidecar."""
    reference = f"{internal.address}/some/thing:1"
    project = strict.contract_project({"network": "none"})
    spec = strict.spec(project)
    deploy, fields = spec.config.deploy, dict[str, Any]()
    config: dict[str, Any]
    if where == "image":
        container = deploy.container.model_copy(update={"image": reference})
        config = {"deploy": deploy.model_copy(update={"container": container})}
    elif where == "artifact":
        built = Artifact(type="image", content="docker.io/a/b:1", digest=reference)
        config = {"artifacts": (built,)}
    else:
        config = {"deploy": deploy.model_copy(update={"pod_template": "DualContainer"})}
        fields = {"datasource": reference}
    spec = strict.spec(project, config=spec.config.model_copy(update=config), **fields)
    with pytest.raises(PolicyRefused, match="does not allow") as raised:
        await strict.engine.start(spec)
    assert "AENV_ALLOW_IMAGES" in (raised.value.hint or "")
    assert internal.asked == []


async def test_the_name_of_an_image_is_never_a_path(dockered: Bench) -> None:
    """Invariant 7: the name is a part of a request to the daemon."""
    with pytest.raises(ConfigError, match="invalid image"):
        await dockered.start(project_of(dockered, "../containers/json?all=1"))


@pytest.mark.parametrize("digits", [None, 12])
async def test_an_id_does_not_get_around_the_allowed_images(
    docker_node: DockerNode, tmp_path: Path, digits: int | None
) -> None:
    """Invariant 15: the id of an image on the node, or its beginning, names no registry.

    An image that has an allowed name can be given by its id too.
    """
    image_id = docker("images", "--quiet", "--no-trunc", base_image())
    reference = image_id if digits is None else image_id.removeprefix("sha256:")[:digits]
    own, name = repository_of(reference), repository_of(base_image())
    for allowed, is_allowed in ((own, False), (name, True)):
        policy = STRICT.model_copy(update={"images": (own, allowed)})
        async with engine_on(docker_node, policy=lambda policy=policy: policy) as engine:
            bench = Bench(engine, tmp_path / str(is_allowed))
            bench_project = project_of(bench, reference)
            if is_allowed:
                assert (await execute(await bench.start(bench_project), "true")).exit_code == 0
            else:
                with pytest.raises(PolicyRefused, match="by its id") as raised:
                    await bench.start(bench_project)
                assert "AENV_ALLOW_IMAGES" in (raised.value.hint or "")


LYING = """FROM {base}
USER root
RUN rm -f "$(command -v python3)" && printf '#!/bin/sh\\necho %s\\n' {report} > /usr/bin/python3 \\
    && chmod 755 /usr/bin/python3
"""


@pytest.mark.parametrize(
    "report",
    [
        '\'{"version":[3,12],"machine":"UP%s","libc":"glibc"}\'',
        '\'{"version":[4,"x/UP%s"],"machine":"x86_64","libc":"glibc"}\'',
        "'[[[[[['",
        "7",
    ],
    ids=["machine", "version", "no JSON", "a number"],
)
async def test_the_python_path_that_an_image_reports_becomes_no_path_of_the_node(
    dockered: Bench, tmp_path: Path, report: str
) -> None:
    """Invariant 13: it names the directory of the libraries that the node installs for it."""
    target = tmp_path / "planted"
    words = report.replace("UP", "../" * 20).replace("%s", str(target))
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(LYING.format(base=base_image(), report=words))
    name = f"aenv-test-lying:{uuid.uuid4().hex}"
    docker("build", "--quiet", "--tag", name, str(context))
    try:
        with pytest.raises(SandboxStartFailed, match="is not a Python"):
            await dockered.start(project_of(dockered, name))
    finally:
        docker("rmi", "--force", name)
    assert list(tmp_path.glob("planted*")) == []


# --- users ---------------------------------------------------------------------------------------

PRINT_USER = """
from aenv_ray.runtime import register_tool, sidecar


@register_tool
def user() -> str:
    return sidecar.exec("id -u").text().strip()
"""


@contextlib.contextmanager
def image_with(change: str, name: str) -> Iterator[str]:
    """Yield an image with a shell whose Dockerfile has one more line."""
    container = docker("create", shell_image(), "true")
    try:
        docker("commit", "--change", change, container, name)
    finally:
        docker("rm", container)
    try:
        yield name
    finally:
        docker("rmi", name)


def dual_project(bench: Bench) -> Path:
    deploy = {"network": "none", "podTemplate": "DualContainer"}
    return bench.project({"tools.py": PRINT_USER}, {"deployConfig": deploy})


@pytest.mark.parametrize("where", ["image", "sidecar"])
async def test_labels_of_an_image_do_not_control_the_janitor(dockered: Bench, where: str) -> None:
    """Invariants 3 and 7: a daemon gives the labels of an image to its containers.

    The janitor would remove the volume of others, or never again look at any container.
    """
    change = "LABEL aenv.storage-bytes=x aenv.volume=pgdata"
    with image_with(change, f"aenv-test-label:{uuid.uuid4().hex[:12]}") as image:
        if where == "image":
            spec = dockered.spec(project_of(dockered, image))
        else:
            spec = dockered.spec(dual_project(dockered), datasource=image)
        with pytest.raises(SandboxStartFailed, match=r"reserved labels: aenv\.storage-bytes, aenv"):
            await dockered.engine.start(spec)


async def test_an_image_does_not_make_itself_root(strict: Bench) -> None:
    """Its own /etc/passwd says which user a name is, that of the policy's marker included."""
    for user in ("nonroot", "0", "root"):
        with (
            image_with(f"USER {user}", f"aenv-test-user:{uuid.uuid4().hex[:12]}") as image,
            pytest.raises(PolicyRefused, match="USER of its image") as raised,
        ):
            await strict.start(project_of(strict, image))
        assert "AENV_ALLOW_USERS" in (raised.value.hint or "")


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_sidecar_is_root_only_if_the_operator_trusts_its_image(
    strict: Bench, by_id: bool
) -> None:
    """Its user is that of its image, which publishers choose, so the policy applies to it too."""
    for change, name in (
        ("WORKDIR /", "eve/any"),
        ("USER root", "eve/any"),
        ("USER nonroot", "eve/any"),
        ("USER 1000", "eve/any"),
        ("WORKDIR /", "swebench/sweb.eval.x86_64.probe"),
    ):
        with image_with(change, f"{name}:{uuid.uuid4().hex[:12]}") as image:
            source = docker("images", "--quiet", "--no-trunc", image) if by_id else image
            if name.startswith("eve") and change != "USER 1000":
                with pytest.raises(PolicyRefused, match="a sidecar with image") as raised:
                    await strict.start(dual_project(strict), datasource=source)
                assert "AENV_ALLOW_ROOT_SIDECARS" in (raised.value.hint or "")
                continue
            pair = await strict.start(dual_project(strict), datasource=source)
            is_root = await value_of(pair, "user") == "0"
            assert is_root == name.startswith("swebench")
            missing = "; ".join(pair.isolation.missing)
            assert ("its sidecar runs as 0:0" in missing) == is_root
            await strict.engine.stop([pair.instance_id])
