"""Projects with requirements get a virtual environment, built once for each content."""

from __future__ import annotations

import asyncio
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.engines.images import runtime_kit as docker_kit
from aenv_ray.engines.process import virtual_environment
from aenv_ray.engines.process.virtual_environment import read_requirements
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, evaluate, value_of
from tests.contract.process.node import Node

TOOLS = (
    "from aenv_ray.runtime import register_tool\nimport six\n"
    "@register_tool\ndef word() -> str:\n    return six.__name__\n"
    "@register_tool\ndef evaluate(source: str):\n    names = {}\n    exec(source, names)\n"
    "    return names['result']\n"
)


@pytest.fixture
async def bench(own_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = own_node.engine(HostId("host-requirements"))
    yield Bench(engine, tmp_path)
    await engine.stop([row.instance_id for row in await engine.running()])
    await engine.close()


async def test_requirements_are_there_and_ray_is_not(bench: Bench, own_node: Node) -> None:
    """Design D4 and invariant 7: what a project names, and nothing of the fabric."""
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("# what it needs\nsix\naenvironment==0.1\n")
    started = await bench.engine.start_many([bench.spec(project) for _ in range(3)])
    for sandbox in started:
        assert not isinstance(sandbox, Exception), sandbox
    sandbox = started[0]
    assert not isinstance(sandbox, Exception)
    assert await value_of(sandbox, "word") == "six"
    found = (
        "import importlib.util as u\n"
        "result = [n for n in ('ray', 'redis', 'docker', 'httpx') if u.find_spec(n)]\n"
    )
    assert await evaluate(sandbox, found) == []
    where = "import sys, six; result = [sys.prefix, six.__file__]"
    for place in await evaluate(sandbox, where):
        assert place.startswith(str(own_node.data_dir / "environments"))


async def test_hosts_that_ask_at_once_build_once(
    bench: Bench, own_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("six\n")
    built: list[Path] = []
    build = virtual_environment._build

    async def counted(project_dir: Path, requirements: list[str], target: Path) -> None:
        built.append(target)
        await build(project_dir, requirements, target)

    monkeypatch.setattr(virtual_environment, "_build", counted)
    cache = own_node.data_dir / "environments"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(virtual_environment.ensure(project, cache)) for _ in range(4)]
    pythons = {task.result() for task in tasks}
    assert len(pythons) == 1
    assert len(built) == 1
    assert await virtual_environment.ensure(project, cache) in pythons
    assert len(built) == 1


async def test_a_failed_installation_is_told_in_the_installers_words(
    bench: Bench, own_node: Node
) -> None:
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("./no-such-directory-here\n")
    with pytest.raises(SandboxStartFailed, match="no-such-directory-here") as raised:
        await bench.start(project)
    assert "requirements" in raised.value.message
    assert not list((own_node.data_dir / "environments").glob("*/bin/python"))


async def test_an_indexs_password_is_in_no_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in that of an address which the installer refuses, and repeats."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:geh@eim@")
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("six\n")
    with pytest.raises(SandboxStartFailed, match="https://") as raised:
        await bench.start(project)
    assert "eim" not in f"{raised.value} {vars(raised.value)}"


async def test_requirements_that_are_no_text_are_refused(bench: Bench) -> None:
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"requirements\.txt"):
        await bench.start(project)


def test_what_the_runtime_stands_in_for_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# comment\n\naenvironment>=0.1  # theirs\nAENV-ray[x]\n  numpy>=2 ; python_version>'3'\n"
        "six # note\n"
    )
    assert read_requirements(tmp_path) == ["numpy>=2 ; python_version>'3'", "six # note"]
    assert read_requirements(tmp_path / "nowhere") == []


def test_a_file_without_requirements_installs_nothing(tmp_path: Path) -> None:
    """Whoever waits for an instance is told of an installation only where there may be one."""
    file = tmp_path / "requirements.txt"
    assert not virtual_environment.may_be_installing(tmp_path)
    for content, may in ((b"# none yet\naenv-ray\n", False), (b"six\n", True), (b"\xff", False)):
        file.write_bytes(content)
        assert virtual_environment.may_be_installing(tmp_path) is may


async def test_packages_come_from_where_pip_would_take_them(
    bench: Bench, own_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of the user's own, beside those of the index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    about = "Metadata-Version: 2.1\nName: aenv-private\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheels / "aenv_private-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("aenv_private.py", "")
        for name, text in (("METADATA", about), ("WHEEL", kind), ("RECORD", "")):
            wheel.writestr(f"aenv_private-1.0.dist-info/{name}", text)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    project = bench.project({"tools.py": TOOLS.replace("import six", "import aenv_private as six")})
    (project / "requirements.txt").write_text("aenv-private\n")
    sandbox = await bench.start(project)
    assert await value_of(sandbox, "word") == "aenv_private"


async def test_so_do_the_libraries_for_an_images_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror is all that some nodes reach; this one is empty."""
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}")
    python = docker_kit.ImagePython((3, 12), "x86_64", "glibc")
    with pytest.raises(SandboxStartFailed, match="no version of pydantic"):
        await docker_kit._install_libraries(python, tmp_path / "lib")
