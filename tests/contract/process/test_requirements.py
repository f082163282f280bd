"""Projects with requirements get a virtual environment, built once for each content."""

from __future__ import annotations

import asyncio
import os
import re
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.config import read_settings
from aenv_ray.engines.images import runtime_bundle
from aenv_ray.engines.process import virtual_environment
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.engines.process.interpreters import found, running
from aenv_ray.engines.process.requirements import Requirements, read_requirements
from aenv_ray.engines.process.virtual_environment import Build
from aenv_ray.errors import ConfigError, DeadlineExceeded, SandboxStartFailed
from aenv_ray.files import FileLock
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, evaluate, value_of
from tests.contract.process.node import SCOPE, Node

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


async def test_requirements_are_installed_and_ray_is_not(bench: Bench, own_node: Node) -> None:
    """Invariant 7: what a project names, and nothing of the fabric."""
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
    build = Build._build

    async def counted(self: Build) -> None:
        built.append(self.target)
        await build(self)

    monkeypatch.setattr(Build, "_build", counted)
    cache = own_node.data_dir / "environments"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(virtual_environment.ensure(project, cache)) for _ in range(4)]
    pythons = {task.result() for task in tasks}
    assert len(pythons) == 1
    assert len(built) == 1
    assert await virtual_environment.ensure(project, cache) in pythons
    assert len(built) == 1


async def test_data_directories_share_what_is_installed(
    bench: Bench, own_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`AENV_REQUIREMENTS_CACHE`, which is set for all tests of a run."""
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("six\n")
    cache = read_settings().requirements_cache
    assert cache is not None
    await virtual_environment.ensure(project, cache)

    async def built(self: Build) -> None:
        raise AssertionError(f"{self.target} is built again")

    monkeypatch.setattr(Build, "_build", built)
    engine = ProcessEngine(
        HostId("host-other"), runtime_dir=own_node.root / "r", data_dir=own_node.root / "other",
        scope=SCOPE, owner_pid=os.getpid(), requirements_cache=cache,
    )  # fmt: skip
    try:
        sandbox = await Bench(engine, tmp_path).start(project)
        assert await value_of(sandbox, "word") == "six"
        await engine.stop([sandbox.instance_id])
    finally:
        await engine.close()


@pytest.mark.parametrize("mode", [0o777, 0o775])
async def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Invariant 13: another user of the machine could put code into every sandbox."""
    (tmp_path / "requirements.txt").write_text("six\n")
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(ConfigError, match="other users can write") as raised:
        await virtual_environment.ensure(tmp_path, cache)
    assert "AENV_REQUIREMENTS_CACHE" in str(raised.value.hint)


async def test_the_error_for_a_failed_installation_quotes_the_installer(
    bench: Bench, own_node: Node
) -> None:
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("no-such-package-aenv==1.0\n")
    with pytest.raises(SandboxStartFailed, match="no-such-package-aenv") as raised:
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


async def test_a_cancelled_start_leaves_the_environment_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create that is cancelled while another builds must not block every later one."""
    (tmp_path / "requirements.txt").write_text("six\n")
    cache = tmp_path / "cache"
    cache.mkdir()
    lock_path = lock_of(tmp_path, cache)

    with FileLock.acquire(lock_path, 1.0):
        waiting = asyncio.create_task(virtual_environment.ensure(tmp_path, cache))
        await asyncio.sleep(0)  # now it waits for the lock
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    started = asyncio.Event()

    async def build(*_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Build, "_build", build)
    building = asyncio.create_task(virtual_environment.ensure(tmp_path, cache))
    async with asyncio.timeout(10):
        await started.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    lock = FileLock.try_acquire(lock_path)
    assert lock is not None
    lock.close()


async def test_the_error_names_a_lock_that_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9."""
    (tmp_path / "requirements.txt").write_text("six\n")
    lock_path = lock_of(tmp_path, tmp_path)
    monkeypatch.setattr(virtual_environment, "LOCK_DEADLINE_S", 0.01)
    with (
        FileLock.acquire(lock_path, 1.0),
        pytest.raises(DeadlineExceeded, match=re.escape(str(lock_path))),
    ):
        await virtual_environment.ensure(tmp_path, tmp_path)


def lock_of(project_dir: Path, cache_dir: Path) -> Path:
    requirements = read_requirements(project_dir)
    return Build(project_dir, cache_dir, requirements, "auto", running(), is_jailed=True).lock


def write_files(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def test_packages_that_the_runtime_replaces_are_not_installed(tmp_path: Path) -> None:
    write_files(tmp_path, {
        "requirements.txt": "# comment\n\naenvironment>=0.1  # theirs\nAENV-ray[x]\n"
        "  numpy>=2 ; python_version>'3'\nsix # note\nidna \\\n  --hash=sha256:00\n"
    })  # fmt: skip
    assert read_requirements(tmp_path).packages == [
        "numpy>=2 ; python_version>'3'", "six", "idna --hash=sha256:00",
    ]  # fmt: skip
    assert read_requirements(tmp_path / "nowhere") == Requirements()


def test_included_files_are_read_relative_to_the_including_file(tmp_path: Path) -> None:
    write_files(tmp_path, {
        "requirements.txt": "-r deps/base.txt\n--constraint=deps/limits.txt\nsix\n",
        "deps/base.txt": "--requirement more.txt\nidna\n-c limits.txt\naenv-ray\n",
        "deps/more.txt": "-rbase.txt\n-r ../requirements.txt\n",
        "deps/limits.txt": "idna<4\n-r more-limits.txt\n",
        "deps/more-limits.txt": "six<2\n",
    })  # fmt: skip
    assert read_requirements(tmp_path) == Requirements(["idna", "six"], ["idna<4", "six<2"])


@pytest.mark.parametrize("file", ["base.txt", "limits.txt"])
def test_a_change_in_an_included_file_changes_the_environment(tmp_path: Path, file: str) -> None:
    write_files(tmp_path, {
        "requirements.txt": "-r base.txt\n-c limits.txt\n", "base.txt": "six\n", "limits.txt": "",
    })  # fmt: skip
    before = read_requirements(tmp_path).key()
    (tmp_path / file).write_text("six<2\n")
    assert read_requirements(tmp_path).key() != before


@pytest.mark.parametrize("option", ["-r", "-c"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.txt", "outside the project"),
        ("/etc/hostname", "outside the project"),
        ("link.txt", "outside the project"),
        ("missing.txt", "does not exist"),
        ("binary.txt", "cannot be read"),
    ],
)
def test_an_included_file_that_cannot_be_used_is_refused(
    tmp_path: Path, option: str, name: str, message: str
) -> None:
    """Invariant 13: the installer runs for everybody and must not read the node's files."""
    project = tmp_path / "project"
    write_files(project, {"requirements.txt": f"six\n{option} {name}\n"})
    (tmp_path / "secret.txt").write_text("six\n")
    (project / "link.txt").symlink_to(tmp_path / "secret.txt")
    (project / "binary.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=message) as raised:
        read_requirements(project)
    assert name in raised.value.message
    assert not virtual_environment.may_be_installing(project)


async def test_included_requirements_are_installed_within_their_constraints(
    bench: Bench, own_node: Node
) -> None:
    project = bench.project({"tools.py": TOOLS})
    write_files(project, {
        "requirements.txt": "-r deps/base.txt\n", "deps/base.txt": "six\n-c limits.txt\n",
        "deps/limits.txt": "six==1.16.0\n",
    })  # fmt: skip
    sandbox = await bench.start(project)
    version = "import six; result = six.__version__"
    assert await evaluate(sandbox, version) == "1.16.0"


async def test_a_project_that_requires_another_python_runs_in_it(bench: Bench) -> None:
    other = next((one for one in found() if one.version != running().version), None)
    if other is None:
        pytest.skip("this machine has one Python that the runtime runs in")
    wanted = f"=={other.version}"
    project = bench.project({"tools.py": TOOLS}, {"requiresPython": wanted})
    (project / "requirements.txt").write_text("six\n")
    sandbox = await bench.start(project)
    version = "import platform; result = platform.python_version()"
    assert await evaluate(sandbox, version) == other.version
    assert await value_of(sandbox, "word") == "six"


async def test_a_python_that_the_node_lacks_is_refused_before_a_sandbox_starts(
    bench: Bench, own_node: Node
) -> None:
    project = bench.project({"tools.py": TOOLS}, {"requiresPython": ">=3.99"})
    (refused,) = await bench.engine.start_many([bench.spec(project)])
    assert isinstance(refused, ConfigError)
    assert ">=3.99" in refused.message
    assert running().version in refused.message
    assert "uv python install" in str(refused.hint)
    assert own_node.sandbox_pids() == []


def test_a_file_without_requirements_installs_nothing(tmp_path: Path) -> None:
    """A waiting create mentions an installation only where there may be one."""
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


async def test_libraries_for_an_images_python_come_from_where_pip_would_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror is all that some nodes reach; this one is empty."""
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}")
    python = runtime_bundle.ImagePython((3, 12), "x86_64", "glibc")
    with pytest.raises(SandboxStartFailed, match=r"no version of pydantic|pydantic was not found"):
        await runtime_bundle._install_libraries(python, tmp_path / "lib")
