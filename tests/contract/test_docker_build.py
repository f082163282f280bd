"""`aenv build` on a real daemon: the image carries the runtime, and instances run it by digest."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.main import main
from aenv_ray.config import settings
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, value_of, write_project
from tests.contract.docker_node import DockerNode, base_image, data_dir, docker

pytestmark = pytest.mark.docker

HOST = HostId("host-build")

_TOOL = (
    "from pathlib import Path\nfrom aenv_ray.runtime import register_tool\n"
    "@register_tool\ndef word() -> str:\n    return Path('/word').read_text().strip()\n"
)


@pytest.fixture(autouse=True)
def _shared_kits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AENV_DATA_DIR", str(data_dir()))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def name() -> Iterator[str]:
    """Yield a name for images that nobody else has; they are removed afterwards."""
    name = f"built-{uuid.uuid4().hex[:8]}"
    yield name
    found = docker("images", "--quiet", "--filter", f"reference=localhost/tests/{name}")
    if found:
        docker("rmi", "--force", *set(found.split()))


def write(directory: Path, dockerfile: str, build: dict[str, Any] | None = None) -> Path:
    config = {
        "deployConfig": {"network": "none"},
        "buildConfig": {"dockerfile": "./docker/Dockerfile", **(build or {})},
        "artifacts": [{"type": "dataset", "content": "kept"}],
        "codeUrl": "kept too",
    }
    project = write_project(directory, {"tools.py": _TOOL}, config)
    (project / "docker").mkdir()
    (project / "docker" / "Dockerfile").write_text(dockerfile)
    return project


def build(project: Path, name: str, *options: str) -> int:
    where = ["-w", str(project), "-r", "localhost", "-s", "tests", "-n", name]
    return main(["build", *where, *options])


async def test_an_instance_runs_the_built_image_with_the_runtime_that_it_carries(
    tmp_path: Path, name: str, docker_node: DockerNode, capsys: pytest.CaptureFixture[str]
) -> None:
    dockerfile = f"FROM {base_image()}\nARG WORD\nRUN echo $WORD > /word\n"
    project = write(tmp_path / "p", dockerfile, {"build_args": {"WORD": "config"}})
    options = ("--build-arg", "WORD=caller", "-t", "one", "-t", "two")
    assert await asyncio.to_thread(build, project, name, *options) == 0
    printed, digest = capsys.readouterr().out.split()
    assert printed == f"localhost/tests/{name}:one"
    config = json.loads((project / "config.json").read_text())
    kept, made = config["artifacts"]
    assert kept == {"type": "dataset", "content": "kept"}
    assert made == {"type": "image", "content": printed, "digest": digest}
    assert config["codeUrl"] == "kept too"
    for tag in ("one", "two"):
        listed = docker("inspect", "--format", "{{.Id}}", f"localhost/tests/{name}:{tag}")
        assert listed == digest
    engine = docker_node.engine(HOST, image=None)
    try:
        sandbox = await Bench(engine, tmp_path).start(project)
        assert await value_of(sandbox, "word") == "caller"
        assert sandbox.start_mode == f"container: {digest[:19]} with its own runtime"
        await engine.stop([sandbox.instance_id])
    finally:
        await engine.close()


def test_a_failing_step_is_named_with_its_words_and_changes_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", f"FROM {base_image()}\nRUN echo some words; exit 3\n")
    before = (project / "config.json").read_bytes()
    assert build(project, name) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "at step 2/2 : RUN echo some words; exit 3" in err
    assert "\nsome words\n" in err
    assert (project / "config.json").read_bytes() == before


def test_what_is_missing_is_said(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", "FROM scratch\n")
    assert build(project, name, "-f", "nowhere/Dockerfile") == 3
    assert "nowhere/Dockerfile" in capsys.readouterr().err
    assert build(project, name, "--build-arg", "novalue") == 3
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    settings.cache_clear()
    assert build(project, name) == 1
    assert "no.sock" in capsys.readouterr().err


async def test_an_image_of_another_node_says_that_it_was_not_pushed(
    tmp_path: Path, docker_node: DockerNode
) -> None:
    digest = "sha256:" + "0" * 64
    artifacts = [{"type": "image", "content": "x:1", "digest": digest}]
    project = write_project(tmp_path / "p", {"tools.py": _TOOL}, {"artifacts": artifacts})
    engine = docker_node.engine(HOST)
    try:
        with pytest.raises(SandboxStartFailed, match="not on this node") as raised:
            await Bench(engine, tmp_path).start(project)
        assert "--push" in str(raised.value.hint)
    finally:
        await engine.close()
