"""The publisher of an environment attacks the node that installs its requirements."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.actors.fabric.publishing import inspect
from aenv_ray.config import Settings
from aenv_ray.engines.node.installer import run_installer
from aenv_ray.engines.process import virtual_environment
from aenv_ray.engines.process.package_proxy import PackageProxy
from aenv_ray.engines.process.requirements import read_requirements
from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.project import project
from aenv_ray.runtime.fork import jail_spec
from aenv_ray.testing.contract_bench import Bench, value_of, write_project
from tests.contract.process.node import Node

SECRET = "6f2b-secret-of-the-node"
BACKEND = """
import base64, json, os, socket
from pathlib import Path

def attempt(action):
    try:
        return action() or "done"
    except Exception as exc:
        return type(exc).__name__

def connect(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(3)
        sock.connect(address)

def ask_proxy(request):
    host, _, port = os.environ["HTTPS_PROXY"].rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), 3) as sock:
        sock.sendall(request.encode())
        return sock.recv(100).decode().split("\\r\\n")[0]

def build_wheel(*_, **__):
    goal = json.loads(Path(__file__).with_name("goal.json").read_text())
    found = {
        "variables": sorted(os.environ),
        "values": [v for v in os.environ.values() if goal["secret"] in v],
        "read": {p: attempt(lambda: Path(p).read_text()[:200]) for p in goal["read"]},
        "write": {p: attempt(lambda: Path(p).write_text("x")) for p in goal["write"]},
        "processes": [p for p in os.listdir("/proc") if p.isdigit()],
        "commands": [Path(f"/proc/{p}/cmdline").read_text() for p in os.listdir("/proc")
                     if p.isdigit()],
        "tcp": attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", goal["port"]))),
        "unix": attempt(lambda: connect(socket.AF_UNIX, goal["socket"])),
        "abstract": attempt(lambda: connect(socket.AF_UNIX, goal["abstract"])),
        "tunnel": attempt(lambda: ask_proxy(
            f"CONNECT 127.0.0.1:{goal['port']} HTTP/1.1\\r\\n\\r\\n")),
        "get": attempt(lambda: ask_proxy(
            f"GET http://127.0.0.1:{goal['port']}/x HTTP/1.1\\r\\n\\r\\n")),
        "namespace": attempt(lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else
                             __import__("ctypes").CDLL(None).unshare(0x10000000) and "refused"),
        "ids": [os.getuid(), os.geteuid()],
        "capabilities": Path("/proc/self/status").read_text().partition("CapEff:\\t")[2][:16],
    }
    raise SystemExit("FOUND " + base64.b64encode(json.dumps(found).encode()).decode() + " END")
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
TOOLS = "from aenv_ray.runtime import register_tool\nimport pwn\n@register_tool\ndef who() -> str:\n    return pwn.WHO\n"  # noqa: E501


@pytest.fixture
async def bench(own_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench on its own node, without virtual environments of earlier tests."""
    engine = own_node.engine(HostId("host-publisher"))
    yield Bench(engine, tmp_path)
    await engine.stop([row.instance_id for row in await engine.running()])
    await engine.close()


@contextmanager
def listening() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Listen on this node as its services do; yield the addresses, and what has connected."""
    connected: list[str] = []
    directory = tempfile.mkdtemp(prefix="ae-")  # short: a socket's path holds 107 bytes
    path = f"{directory}/s"
    places = {"port": ("127.0.0.1", 0), "socket": path, "abstract": f"\0ae-{os.getpid()}"}
    found: dict[str, Any] = {}
    servers = []
    for name, place in places.items():
        server = socket.socket(socket.AF_INET if name == "port" else socket.AF_UNIX)
        server.bind(place)
        server.listen()
        servers.append(server)
        found[name] = server.getsockname()[1] if name == "port" else place

        def accept(server: socket.socket = server, name: str = name) -> None:
            try:
                while True:
                    server.accept()[0].close()
                    connected.append(name)
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
    try:
        yield found, connected
    finally:
        for server in servers:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
        shutil.rmtree(directory)


def project_with(directory: Path, lines: str, files: dict[str, str] | None = None) -> Path:
    """Write a project with these requirements and further files."""
    directory.mkdir(parents=True)
    for name, text in {"requirements.txt": lines, **(files or {})}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def wheel(directory: Path, who: str, package: str = "pwn", needs: str = "", **more: str) -> None:
    """Write a wheel of a package, with further files, which may require another one."""
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    facts = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    with zipfile.ZipFile(directory / f"{package}-1.0-py3-none-any.whl", "w") as made:
        made.writestr(f"{package}.py", f"WHO = {who!r}\n")
        for name, text in more.items():
            made.writestr(name, text)
        made.writestr(
            f"{package}-1.0.dist-info/METADATA",
            facts + (f"Requires-Dist: {needs}\n" if needs else ""),
        )
        made.writestr(f"{package}-1.0.dist-info/WHEEL", kind)
        made.writestr(f"{package}-1.0.dist-info/RECORD", "")


@pytest.mark.namespaces
@pytest.mark.ordinary_user
async def test_a_build_backend_reaches_nothing_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: no variable, no file, no process, no socket, and the network by no way."""
    monkeypatch.setenv("AENV_API_KEY", SECRET)
    secret = tmp_path / "up.json"
    secret.write_text(SECRET)
    cache = tmp_path / "cache"
    marker = tmp_path / "written"
    with listening() as (addresses, connected):
        goal = addresses | {
            "secret": SECRET, "read": [str(secret), "/etc/shadow", f"/proc/{os.getpid()}/environ"],
            "write": [str(marker), "/usr/lib/pwn", "/etc/pwn", "/project/pwn",
                      str(cache / "pwn.done"), f"{sys.prefix}/pwn"],
        }  # fmt: skip
        project = project_with(tmp_path / "project", "./pwn\n", {
            "pwn/pyproject.toml": PYPROJECT, "pwn/backend.py": BACKEND,
            "pwn/goal.json": json.dumps(goal),
        })  # fmt: skip
        with pytest.raises(SandboxStartFailed) as raised:
            await virtual_environment.ensure(project, cache, "auto")
    text = re.search(r"FOUND\s+([A-Za-z0-9+/=\s]+?)\s+END", raised.value.message)
    assert text is not None, raised.value.message
    found = json.loads(base64.b64decode("".join(text[1].split())))
    assert connected == []
    assert found["values"] == []
    assert "AENV_API_KEY" not in found["variables"]
    assert {k: v for k, v in found["read"].items() if "Error" not in v} == {}
    assert {k: v for k, v in found["write"].items() if "Error" not in v} == {}
    assert all("Error" in found[way] for way in ("tcp", "unix", "abstract")), found
    assert {found["tunnel"], found["get"]} == {"HTTP/1.1 403 Forbidden"}
    assert len(found["processes"]) < 10
    assert not any(str(os.getpid()) == number for number in found["processes"]) or os.getpid() < 10
    assert "-m pytest" not in " ".join(found["commands"]).replace("\0", " ")
    assert found["namespace"] == "refused"
    assert 0 not in found["ids"]
    assert int(found["capabilities"], 16) == 0
    assert not marker.exists()


@pytest.mark.namespaces
async def test_behind_a_gateway_nothing_is_built(tmp_path: Path) -> None:
    """Invariant 13: with AENV_ISOLATION=required, only wheels are installed."""
    project = project_with(tmp_path / "project", "./pwn\n", {
        "pwn/pyproject.toml": PYPROJECT, "pwn/backend.py": "raise SystemExit('FOUND')",
    })  # fmt: skip
    with pytest.raises(SandboxStartFailed) as raised:
        await virtual_environment.ensure(project, tmp_path / "cache", "required")
    assert "FOUND" not in raised.value.message
    assert "AENV_SOURCE_BUILDS" in str(raised.value.hint)


async def test_code_that_is_built_does_not_see_the_password_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 10."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"https://me:{SECRET}@index.example/simple")
    monkeypatch.setattr(
        virtual_environment, "settings",
        lambda: Settings(source_builds="yes"),
    )  # fmt: skip
    project = project_with(tmp_path / "project", "six\n")
    with pytest.raises(ConfigError, match="AENV_SOURCE_BUILDS") as raised:
        await virtual_environment.ensure(project, tmp_path / "cache", "required")
    assert SECRET not in f"{raised.value} {vars(raised.value)}"


@pytest.mark.parametrize(
    "line",
    [
        "--index-url http://127.0.0.1:9/simple", "--extra-index-url=http://127.0.0.1:9",
        "-i http://127.0.0.1:9", "-f /etc", "--find-links /etc", "--trusted-host x", "-e .",
        "--editable ./pwn", "--no-binary :all:", "--pre", "six --index-url http://127.0.0.1:9",
        "six ; python_version > '3' --index-url http://127.0.0.1:9", "six>=1 --pre",
        "six ; python_version > '3' --pre", "-r https://127.0.0.1/list",
        "-r file:///etc/shadow", "-c file:///etc/shadow", "six @ https://127.0.0.1/six.whl",
        "git+https://127.0.0.1/x.git", "https://127.0.0.1/x.whl", "file:///etc/shadow",
        "six==${UV_DEFAULT_INDEX}", "six ; python_version > '${AENV_API_KEY}'", "-r ${HOME}/x",
        "-r /etc/shadow", "-r ../secret.txt", "-c ../secret.txt", "-r link.txt", "../secret.txt",
        "/etc", "/etc/shadow", "./link.txt", "~/x", "./pwn/../../secret.txt", "link/secret.txt",
        "six @ file:///etc", "pwn @ ../secret.txt", "\x00six", "six\x0b--pre",
    ],
)  # fmt: skip
def test_requirements_name_no_source_and_no_file_outside_of_the_project(
    tmp_path: Path, line: str
) -> None:
    """Invariant 13: and the refusal shows nothing of a file, and no password."""
    (tmp_path / "secret.txt").write_text(f"{SECRET}\n")
    project = project_with(tmp_path / "project", f"six\n{line}\n", {"pwn/setup.py": ""})
    (project / "link.txt").symlink_to(tmp_path / "secret.txt")
    (project / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError) as raised:
        read_requirements(project)
    assert SECRET not in f"{raised.value} {vars(raised.value)}"
    assert raised.value.hint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("six\n" * 10_001, "more than 1 MiB or 10,000 lines"),
        ("#" * 1_048_577, "more than 1 MiB"),
        ("-r 0.txt", "more than 100 files"),
        ("-r " + "a" * 300, "cannot be read"),
        ("./" + "a" * 300, "cannot be read"),
        ("-r loop.txt", "cannot be read|does not exist"),
        ("-r a\x00b", "not text"),
    ],
)
def test_requirements_have_limits(tmp_path: Path, line: str, message: str) -> None:
    """Invariant 7: each is refused as a mistake of the project, and is no failure of a host."""
    chain = {f"{number}.txt": f"-r {number + 1}.txt\n" for number in range(2000)}
    project = project_with(tmp_path / "project", f"{line}\n", {**chain, "2000.txt": "six\n"})
    (project / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(ConfigError, match=message):
        read_requirements(project)


@pytest.mark.parametrize(
    "line", ["six", "six>=1,<2", "six[a,b]~=1.0 ; python_version > '3'", "six (>=1)",
             "numpy==2.*", "six==1.16 --hash=sha256:00ff", "zope.interface", "./wheels/x.whl"],
)  # fmt: skip
def test_what_projects_need_is_allowed(tmp_path: Path, line: str) -> None:
    project = project_with(tmp_path / "project", f"{line}\n", {"wheels/x.whl": ""})
    assert read_requirements(project)


@pytest.mark.namespaces
async def test_an_owner_never_loads_the_package_of_another(bench: Bench) -> None:
    """Invariant 15: the same line of two projects means two packages."""
    found = []
    for who in ("alice", "bob"):
        project = bench.project({"tools.py": TOOLS})
        (project / "requirements.txt").write_text("./pwn-1.0-py3-none-any.whl\n")
        wheel(project, who)
        found.append(await value_of(await bench.start(project), "who"))
    assert found == ["alice", "bob"]


MANY_FILES = """
import os, subprocess, sys, time
from aenv_ray.engines.process import install_jail

target = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g,nr_inodes=2000", "none", target], check=True)
pid = os.fork()
if pid == 0:
    for number in range(1950):
        open(f"{target}/{number}", "w").close()
    time.sleep(60)
    os._exit(0)
print(install_jail._wait(pid, target))
"""


@pytest.mark.namespaces
def test_an_installation_leaves_files_for_others(tmp_path: Path) -> None:
    """Invariant 7: a wheel of empty files takes no space on the disk."""
    ran = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", MANY_FILES, str(tmp_path)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert "more files fit on the disk" in ran.stdout
    assert ran.stdout.endswith("1\n"), "it was ended"


async def test_output_of_an_installer_takes_little_memory() -> None:
    """Invariant 7: a package that is built can print as much as it likes, in the host's process."""
    program = "import sys; print(sys.stdin.read()); [print('x' * 999) for _ in range(200_000)]"
    command = [sys.executable, "-c", f"{program}; print('the end'); sys.exit(3)"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, output = await run_installer(
        command, deadline_s=60.0, variables={}, data=b"x" * 300_000
    )
    assert (status, output.splitlines()[-1]) == (3, "the end")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100_000, "of 200 MB"


@pytest.mark.namespaces
async def test_a_package_finds_no_other_in_the_project(bench: Bench) -> None:
    """Invariant 15: the cache's key does not contain what a wheel names in its metadata."""
    project = bench.project({"tools.py": TOOLS})
    (project / "requirements.txt").write_text("./pwn-1.0-py3-none-any.whl\n")
    hidden = "other-1.0-py3-none-any.whl"
    wheel(project, "alice", needs=f"other @ file://{jail_spec.PROJECT}/{hidden}")
    wheel(project, "alice", package="other")
    with pytest.raises(SandboxStartFailed, match=r"(?s)cannot be installed.*other"):
        await bench.start(project)


@pytest.mark.namespaces
async def test_a_wheel_runs_nothing_outside_of_the_sandbox(bench: Bench, tmp_path: Path) -> None:
    """Invariant 13: a wheel may replace the interpreter, and have code run when it starts."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    marker = open_to_all / "ran"
    touch = f"open({str(marker)!r}, 'w').close()"
    script = f"#!/bin/sh\ntouch {marker}\n"
    files = {
        "evil.pth": f"import os; {touch}\n", "sitecustomize.py": touch, "usercustomize.py": touch,
        "pydantic_core/__init__.py": touch,
        "pwn-1.0.data/scripts/python": script, "pwn-1.0.data/scripts/python3": script,
        "pwn-1.0.data/data/pyvenv.cfg": f"home = {open_to_all}\n",
        "pwn-1.0.data/data/bin/python3.11": script,
    }  # fmt: skip
    for number in range(len(files)):
        name, text = list(files.items())[number]
        project = bench.project({"tools.py": TOOLS})
        (project / "requirements.txt").write_text("./pwn-1.0-py3-none-any.whl\n")
        wheel(project, "alice", **{name: text})
        with contextlib.suppress(SandboxStartFailed):  # a broken interpreter starts nothing
            await bench.start(project)
        assert not marker.exists(), name


REPLACING = """
import os, zipfile
from pathlib import Path

def build_wheel(directory, *_, **__):
    bin = Path(os.environ["HOME"]).parent / "bin"
    {change}
    with zipfile.ZipFile(f"{{directory}}/pwn-1.0-py3-none-any.whl", "w") as made:
        made.writestr("pwn.py", "WHO = 'alice'")
        info = "pwn-1.0.dist-info"
        made.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: pwn\\nVersion: 1.0\\n")
        made.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        made.writestr(f"{{info}}/RECORD", "")
    return "pwn-1.0-py3-none-any.whl"
"""
RELINK = "(bin / 'python').unlink(); (bin / 'python').symlink_to({target!r})"


@pytest.mark.namespaces
@pytest.mark.ordinary_user
@pytest.mark.parametrize("how", ["program", "link", "directory", "nothing"])
async def test_what_is_built_does_not_choose_what_sandboxes_show(
    bench: Bench, own_node: Node, tmp_path: Path, how: str
) -> None:
    """Invariant 13: sandboxes show the directory that the interpreter is a link to."""
    project = bench.project({"tools.py": TOOLS})
    others = project.parent  # as projects of all owners are in one directory of a node
    others.chmod(0o755)
    python = os.path.realpath(sys.executable)
    (project / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (project / "python").chmod(0o755)
    (project / "linked").symlink_to(python)
    change = {
        "program": RELINK.format(target=str(project / "python")),
        "link": RELINK.format(target=str(project / "linked")),
        "directory": "bin.rename(bin.parent / 'b'); bin.symlink_to('b')",
        "nothing": "",
    }[how]
    files = {"pyproject.toml": PYPROJECT, "backend.py": REPLACING.format(change=change)}
    (project / "requirements.txt").write_text("./pwn\n")
    (project / "pwn").mkdir()
    for name, text in files.items():
        (project / "pwn" / name).write_text(text)
    (others / "grader.txt").write_text(SECRET)
    if how == "nothing":  # the build works
        assert await value_of(await bench.start(project), "who") == "alice"
        return
    with pytest.raises(SandboxStartFailed, match="replaces bin/python"):
        await bench.start(project)
    assert not list((own_node.data_dir / "environments").glob("*.done"))


def test_an_environment_is_named_by_the_content_of_directories_too(tmp_path: Path) -> None:
    """Invariant 15: also by names of files, targets of links, and where a content ends."""
    keys = set()
    variants: list[dict[str, str]] = [
        {"a": "x"}, {"a": "y"}, {"b": "x"}, {"a": "x", "b": ""}, {"a": "xb"}, {"d/a": "x"},
    ]  # fmt: skip
    for number, files in enumerate(variants):
        given = {f"pwn/{name}": text for name, text in files.items()}
        keys.add(read_requirements(project_with(tmp_path / str(number), "./pwn", given)).key())
    linked = project_with(tmp_path / "linked", "./pwn", {"pwn/b": ""})
    (linked / "pwn" / "a").symlink_to("x")
    keys.add(read_requirements(linked).key())
    assert len(keys) == len(variants) + 1


REFUSED = """
import asyncio, sys
from pathlib import Path
from aenv_ray.engines.process.virtual_environment import ensure
from aenv_ray.errors import AenvError
from aenv_ray.runtime.fork import seccomp
from aenv_ray.runtime.system import linux

linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.SeccompFilter(seccomp.program()).install()
try:
    print("MADE", asyncio.run(ensure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
except AenvError as exc:
    print("REFUSED", exc.message, exc.hint)
"""


INSPECTED = """
import asyncio, sys
from pathlib import Path
from aenv_ray.actors.fabric.publishing import inspect
from aenv_ray.errors import AenvError
from aenv_ray.policy import Policy
from aenv_ray.project import project
from aenv_ray.runtime.fork import jail_spec
from aenv_ray.runtime.fork import seccomp
from aenv_ray.runtime.system import linux

linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.SeccompFilter(seccomp.program()).install()
try:
    asyncio.run(inspect(project.load(Path(sys.argv[1])), policy=Policy(isolation=sys.argv[2])))
    print("INSPECTED")
except AenvError as exc:
    print("REFUSED", exc.message, exc.hint)
"""


@pytest.mark.parametrize(
    ("isolation", "is_loaded"), [("required", False), ("auto", False), ("none", True)]
)
def test_code_is_inspected_in_a_sandbox_or_not_at_all(
    tmp_path: Path, isolation: str, is_loaded: bool
) -> None:
    """Invariant 13: where the kernel allows no namespaces, the code is not loaded."""
    marker = tmp_path / "loaded"
    code = TOOLS.replace("import pwn", f"open({str(marker)!r}, 'w').close()")
    source = write_project(tmp_path / "project", {"tools.py": code})
    done = subprocess.run(
        [sys.executable, "-c", INSPECTED, str(source), isolation],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith("INSPECTED" if is_loaded else "REFUSED"), done.stdout
    assert marker.exists() is is_loaded
    assert is_loaded or ("unshare" in done.stdout and "AENV_ISOLATION" in done.stdout)


@pytest.mark.namespaces
@pytest.mark.parametrize(
    "listing",
    [
        "7",
        "{'functions': 7}",
        "{'functions': [{}], 'reward': [], 'health': []}",
        "{'functions': [7]}",
    ],
)
async def test_a_project_that_lists_nonsense_is_refused(tmp_path: Path, listing: str) -> None:
    """Invariant 13: what it says of itself is checked, and no failure of the gateway."""
    lie = TOOLS.replace("import pwn", "from aenv_ray.runtime.api.registry import Registry")
    lie += f"Registry.listing = lambda self: {listing}\n"
    source = write_project(tmp_path / "project", {"tools.py": lie})
    with pytest.raises(SandboxStartFailed, match="malformed list of functions"):
        await inspect(project.load(source))


@pytest.mark.parametrize("key", ["context", "dockerfile"])
@pytest.mark.parametrize("path", ["..", "/etc/passwd", "link/passwd"])
def test_a_build_reads_nothing_outside_of_the_project(tmp_path: Path, key: str, path: str) -> None:
    """Invariant 13: the context and the Dockerfile cannot name other files of the builder."""
    source = write_project(tmp_path / "project", {"tools.py": ""})
    (source / "link").symlink_to("/etc")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"buildConfig": {key: path}}))
    done = subprocess.run(
        [sys.executable, "-m", "aenv_ray.cli.main", "build", str(source)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert f"buildConfig.{key}" in done.stderr
    assert "outside the project" in done.stderr


@pytest.mark.parametrize(("isolation", "outcome"), [("required", "REFUSED"), ("auto", "MADE")])
def test_the_error_names_a_kernel_without_namespaces(
    tmp_path: Path, isolation: str, outcome: str
) -> None:
    """Invariant 13: behind a gateway nothing is installed; on a laptop it is, with a notice."""
    project = project_with(tmp_path / "project", "./pwn-1.0-py3-none-any.whl\n")
    wheel(project, "alice")
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(project), str(tmp_path / "cache"), isolation],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith(outcome), done.stdout + done.stderr
    assert "unshare" in done.stdout + done.stderr
    assert "sandbox" in done.stdout + done.stderr


async def test_the_proxy_connects_to_package_sources_only() -> None:
    """Invariant 13: also when a later request of a connection names another host."""
    reached: list[str] = []
    other = "GET http://169.254.169.254/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"

    async def origin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        reached.append(head.decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                reached.append((await reader.readexactly(len(other))).decode())
        writer.close()

    async def asked(proxy: int, text: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(text.encode())
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer.decode()

    async with await asyncio.start_server(origin, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = listener.getsockname()[1]
        said: list[str] = []
        serving = asyncio.create_task(
            PackageProxy({f"127.0.0.1:{port}": ""}, said.append).serve(listener)
        )
        first = f"GET http://127.0.0.1:{port}/simple?x HTTP/1.1\r\nConnection: keep-alive\r\n\r\n"
        async with asyncio.timeout(20):
            for refused in (
                other, "CONNECT localhost:22 HTTP/1.1\r\n\r\n",
                "CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n",
                f"CONNECT 127.0.0.1:{port}@evil:1 HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\n\r\n",
                f"CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1\r\n\r\n", "GARBAGE\r\n\r\n",
                f"GET http://127.0.0.1:{port}@evil/ HTTP/1.1\r\n\r\n",
            ):  # fmt: skip
                assert (await asked(proxy, refused)).split()[1] in {"400", "403"}, refused
            assert reached == []
            assert (await asked(proxy, first + other)).endswith("ok")
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    assert len(reached) == 1
    assert reached[0].startswith("GET /simple?x HTTP/1.1\r\nConnection: close\r\n")
    assert "keep-alive" not in reached[0]
    assert any("169.254.169.254" in line and "AENV_PACKAGE_HOSTS" in line for line in said)
