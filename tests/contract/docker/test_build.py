"""`aenv build` with a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.main import main
from aenv_ray.config import settings
from aenv_ray.engines.images import buildkit as docker_buildkit
from aenv_ray.engines.node.docker_client import DockerClient
from aenv_ray.errors import FabricUnavailable, SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, value_of, write_project
from tests.conftest import require, without_rays_words
from tests.contract.docker.docker_node import (
    ADDRESS,
    DockerNode,
    base_image,
    data_dir,
    docker,
    shell_image,
)
from tests.contract.processes import naming

pytestmark = pytest.mark.docker

HOST = HostId("host-build")

_TOOL = (
    "from pathlib import Path\nfrom aenv_ray.runtime import register_tool\n"
    "@register_tool\ndef word() -> str:\n    return Path('/word').read_text().strip()\n"
)


@pytest.fixture(autouse=True)
def _shared_bundles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AENV_DATA_DIR", str(data_dir()))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def buildkit() -> None:
    """Require BuildKit."""
    require("buildkit", not buildkit_lack(), buildkit_lack())


@cache
def buildkit_lack() -> str:
    """Return why BuildKit cannot be used here; "" if it can."""

    async def find() -> str:
        client = DockerClient(ADDRESS)
        try:
            await docker_buildkit.find(client, os.environ["PATH"])
        except FabricUnavailable as exc:
            return exc.message
        finally:
            await client.close()
        return ""

    return asyncio.run(find())


@pytest.fixture
def name() -> Iterator[str]:
    """Yield a unique name for images, which are removed afterwards."""
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


async def test_an_instance_runs_the_built_image_with_its_own_runtime(
    tmp_path: Path,
    name: str,
    buildkit: None,
    docker_node: DockerNode,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dockerfile = f"FROM {base_image()}\nARG WORD\nRUN echo $WORD > /word\n"
    project = write(tmp_path / "p", dockerfile, {"build_args": {"WORD": "config"}})
    platform = docker("version", "--format", "{{.Server.Os}}/{{.Server.Arch}}")
    options = ("--build-arg", "WORD=caller", "-t", "one", "-t", "two", "-p", platform)
    assert await asyncio.to_thread(build, project, name, *options) == 0
    out, err = map(without_rays_words, capsys.readouterr())
    assert "builder: BuildKit, by " in err
    assert "2/3 " in err or "2/2 " in err
    assert " > /word\n" in err
    printed, digest = out.split()
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


def test_the_error_names_the_failed_step_and_nothing_is_changed(
    tmp_path: Path, name: str, buildkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", f"FROM {base_image()}\nRUN echo some words; exit 3\n")
    before = (project / "config.json").read_bytes()
    assert build(project, name) == 3
    out, err = map(without_rays_words, capsys.readouterr())
    assert out == ""
    assert "at step 2/2 : RUN echo some words; exit 3" in err
    assert "\nsome words\n" in err
    assert "3" in err.splitlines()[-2]
    assert (project / "config.json").read_bytes() == before


def test_a_dockerfile_can_use_what_only_buildkit_has(
    tmp_path: Path, name: str, buildkit: None
) -> None:
    run = "RUN --mount=type=cache,target=/kept echo once more >> /kept/log; cp /kept/log /word"
    project = write(tmp_path / "p", f"FROM {base_image()}\n{run}\n")
    assert build(project, name) == 0


def test_a_repeated_build_gives_the_same_image_and_leaves_no_temporary_tag(
    tmp_path: Path, name: str, buildkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", f"FROM {base_image()}\nRUN echo {name} > /word\n")
    digests = set()
    for _ in range(2):
        assert build(project, name) == 0
        digests.add(capsys.readouterr().out.split()[1])
    assert len(digests) == 1
    tagged = docker("images", "--quiet", "--filter", "reference=localhost/aenv-build").split()
    # Builds of other tests may be under way.
    assert not [image for image in tagged if name in docker("history", "--no-trunc", image)]


@pytest.mark.parametrize(
    ("docker_command", "found"),
    [
        ("[ $1 = buildx ] && echo v0.21 || echo Docker version 28.2.2, build 1", "docker 28.2.2"),
        ("[ $1 = --version ] && echo Docker version 20.10.24+dfsg1, build 1", "docker 20.10.24+"),
    ],
)
async def test_a_docker_command_that_drives_buildkit_is_found(
    tmp_path: Path, docker_command: str, found: str
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker_command}\n")
    (tmp_path / "docker").chmod(0o755)
    client = DockerClient(ADDRESS)
    try:
        assert found in str(await docker_buildkit.find(client, f"/nowhere:{tmp_path}:{tmp_path}"))
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("docker_command", "lack"),
    [
        ("", "no docker command on PATH"),
        ("echo podman version 4.3.1", "without the buildx plugin"),
        ("[ $1 = --version ] && echo Docker version 28.2.2, build e6534b4", "without the buildx"),
    ],
)
def test_a_build_without_buildkit_names_the_way_out(
    tmp_path: Path,
    docker_command: str,
    lack: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = write(tmp_path / "p", "FROM scratch\n")
    if docker_command:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker_command}\n")
        (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(project, "x") == 1
    err = capsys.readouterr().err
    assert "this build needs BuildKit" in err
    assert lack in err
    assert "docker-buildx" in err


def test_the_context_is_the_project_without_what_dockerignore_excludes(
    tmp_path: Path, name: str, buildkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Dockerfile may be outside the context; other files outside cannot be used."""
    project = write(tmp_path / "p", "FROM scratch\n")
    (project / ".dockerignore").write_text("# secrets\nsecret*\n")
    (project / "secret.txt").write_text("x")
    (tmp_path / "beside").write_text("x")
    dockerfile = tmp_path / "Other.dockerfile"
    look = "RUN test -f /made/src/tools.py && ! test -e /made/secret.txt"
    dockerfile.write_text(f"FROM {base_image()}\nCOPY . /made\n{look}\n")
    assert build(project, name, "-f", str(dockerfile)) == 0
    capsys.readouterr()
    dockerfile.write_text(f"FROM {base_image()}\nCOPY ../beside /beside\n")
    assert build(project, name, "-f", str(dockerfile)) == 3
    assert "COPY ../beside" in capsys.readouterr().err


def test_an_unreachable_registry_is_not_a_mistake_in_the_dockerfile(
    tmp_path: Path, name: str, buildkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", "FROM localhost:1/no/registry:1\n")
    assert build(project, name) == 1  # of the infrastructure
    assert "connection refused" in capsys.readouterr().err
    (project / "docker" / "Dockerfile").write_text("NOT an instruction\n")
    assert build(project, name) == 3
    err = capsys.readouterr().err
    assert "does not build" in err
    assert "NOT" in err


def test_the_error_for_another_platform_says_what_is_needed(
    tmp_path: Path, name: str, buildkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = f"localhost/tests/{name}:foreign"
    call_it_foreign(shell_image(), foreign, tmp_path)
    project = write(tmp_path / "p", f"FROM {foreign}\n")
    assert build(project, name, "-p", "linux/s390x") == 1
    err = capsys.readouterr().err
    assert "the runtime cannot be added to a s390x image" in err
    assert "binfmt_misc" in err


def test_ctrl_c_ends_a_build_and_changes_nothing(tmp_path: Path, name: str, buildkit: None) -> None:
    """Invariant 11."""
    project = write(tmp_path / "p", f"FROM {base_image()}\nRUN echo begun; sleep 4321\n")
    before = (project / "config.json").read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv_ray.cli.main", "build", "-w", str(project), "-n", name],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr:
        while "sleep 4321" not in (line := process.stderr.readline()):
            assert line
        wait_for(sleepers, "the step runs")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert (project / "config.json").read_bytes() == before
    wait_for(lambda: not sleepers(), "the step ended")
    assert list(project.glob(".config.json*")) == []


def call_it_foreign(image: str, foreign: str, directory: Path) -> None:
    """Load a copy of an image that claims to be for another platform."""
    saved, unpacked = directory / "saved.tar", directory / "saved"
    docker("save", "--output", str(saved), image)
    unpacked.mkdir()
    subprocess.run(["tar", "-xf", saved, "-C", unpacked], check=True)
    (manifest,) = json.loads((unpacked / "manifest.json").read_text())
    config = json.loads((unpacked / manifest["Config"]).read_text())
    (unpacked / "foreign.json").write_text(json.dumps({**config, "architecture": "s390x"}))
    manifest |= {"Config": "foreign.json", "RepoTags": [foreign]}
    (unpacked / "manifest.json").write_text(json.dumps([manifest]))
    with tarfile.open(saved, "w") as tar:
        for path in ("manifest.json", "foreign.json", *manifest["Layers"]):
            tar.add(unpacked / path, path)
    docker("load", "--input", str(saved))


def sleepers() -> bool:
    """Return whether a step of the test above runs in any container."""
    return "sleep 4321" in naming("sleep 4321").values()


def wait_for(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_invalid_options_and_missing_files_are_reported(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "p", "FROM scratch\n")
    assert build(project, name, "-f", "nowhere/Dockerfile") == 3
    assert "nowhere/Dockerfile" in capsys.readouterr().err
    capsys.readouterr()
    for options, words in (
        (("--build-arg", "novalue"), "not NAME=VALUE"),
        (("-p", "linux/amd64,linux/arm64"), "give one platform"),
        (("-t", "not a tag"), "invalid image tag"),
        (("-n", "Upper"), "invalid image name"),
        (("-r", "https://ghcr.io"), "invalid registry"),
    ):
        assert build(project, name, *options) == 3
        assert words in capsys.readouterr().err
    config = json.loads((project / "config.json").read_text())
    config["buildConfig"]["context"] = "./nowhere"
    (project / "config.json").write_text(json.dumps(config))
    assert build(project, name) == 3
    assert "nowhere is not a directory" in capsys.readouterr().err
    config["buildConfig"]["context"] = "."
    (project / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    settings.cache_clear()
    assert build(project, name) == 1
    assert "no.sock" in capsys.readouterr().err


async def test_the_error_for_an_image_of_another_node_says_that_it_was_not_pushed(
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
