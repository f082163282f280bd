"""Templates of the process engine: what is forked, what is not, and what a template survives."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import aenv_ray
from aenv_ray import daemon
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.process.templates import SPARES
from aenv_ray.errors import SandboxStartFailed
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, eventually, value_of
from tests.contract.process.node import SCOPE, Node
from tests.contract.processes import signal_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")


@pytest.fixture
async def bench(own_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    engine = own_node.engine(HostId("host-templates"))
    yield Bench(engine, tmp_path)
    await engine.close()


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from _below(int(child))


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def start_launcher(node: Node, change: str) -> None:
    """Start a node's launcher with something changed in it."""
    source = (
        f"import sys; from aenv_ray.engines.process import launcher; del sys.argv[0]\n{change}\n"
    )
    command = [
        sys.executable,
        "-P",
        "-c",
        f"{source}launcher.main()",
        "aenv_ray.engines.process.launcher",
    ]
    subprocess.run(
        [*command, str(node.directory)], env=daemon.environment(), check=True, timeout=30
    )


# --- what a template survives -----------------------------------------------------------------


@pytest.mark.parametrize("own_node", ["none"], indirect=True)
async def test_a_node_without_room_refuses_and_affects_no_other_sandbox(
    bench: Bench, own_node: Node
) -> None:
    """What runs lives on, what is asked for is refused in words, and later there is room again."""
    start_launcher(own_node, "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (30, 30))")
    sandboxes: list[Sandbox] = []
    refused: SandboxStartFailed | None = None
    while refused is None and len(sandboxes) < 30:
        try:
            sandboxes.append(await bench.start())
        except SandboxStartFailed as exc:
            refused = exc
    assert "open files" in str(refused)
    assert len(sandboxes) > 3
    for sandbox in sandboxes:
        assert await value_of(sandbox, "echo", text="all the same") == "all the same"
    await bench.engine.stop([sandbox.instance_id for sandbox in sandboxes])
    again = await bench.start()
    assert await value_of(again, "echo", text="again") == "again"
    await bench.engine.stop([again.instance_id])


async def test_a_spare_that_dies_is_replaced(bench: Bench, own_node: Node) -> None:
    """Nobody gets a dead one: another process becomes the instance."""
    sandboxes = [await bench.start()]
    await eventually(lambda: len(_spares(own_node)) == SPARES, "spares wait")
    signal_all(dead := _spares(own_node))
    for _ in range(2):
        sandboxes.append(await bench.start())
        assert await value_of(sandboxes[-1], "echo", text="hi") == "hi"
    assert not set(dead) & set(_spares(own_node))
    await bench.engine.stop([sandbox.instance_id for sandbox in sandboxes])


def _spares(node: Node) -> list[int]:
    (launcher,) = node.launcher_pids()
    return [pid for pid in _below(launcher) if _name(pid) == "aenv-spare"]


async def test_a_template_whose_code_hangs_ends_at_its_deadline(
    bench: Bench, own_node: Node
) -> None:
    """Invariant 9: typed, and nothing of it is left."""
    start_launcher(
        own_node,
        "from aenv_ray.engines.process import templates as t; t.TEMPLATE_DEADLINE_S = 1",
    )
    hanging = bench.project({"tools.py": "import threading\nthreading.Event().wait()\n"})
    with pytest.raises(SandboxStartFailed, match="not loaded after 1 s"):
        await bench.start(hanging)
    (launcher,) = own_node.launcher_pids()
    await eventually(lambda: not list(_below(launcher)), "the template that hung is gone")


async def test_a_template_that_hangs_is_ended_with_its_instances(
    bench: Bench, own_node: Node
) -> None:
    """Invariant 3: what only it could end does not outlive its deadline."""
    start_launcher(
        own_node, "from aenv_ray.engines.process import templates as t; t.SILENT_SWEEPS = 2"
    )
    sandbox = await bench.start()
    (launcher,) = own_node.launcher_pids()
    signal_all(_below(launcher), signal.SIGSTOP)
    await bench.engine.stop([sandbox.instance_id])
    await eventually(lambda: not own_node.left_over(), "nothing is left")


# --- projects that cannot be forked -----------------------------------------------------------

_TOOL = (
    "from aenv_ray.runtime import register_tool\n@register_tool\ndef one() -> int:\n    return 1\n"
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()\n",
            "bare: its code starts threads",
        ),
        (
            "import _thread\nLOCK = _thread.allocate_lock()\nLOCK.acquire()\n"
            "_thread.start_new_thread(LOCK.acquire, ())\n",
            "bare: its code starts threads",
        ),
        (
            "import subprocess\nKEPT = subprocess.Popen(['sleep', '60'])\n",
            "bare: its code starts processes",
        ),
        ("import subprocess\nsubprocess.run(['true'], check=True)\n", "template"),
        ("import socket\nKEPT = socket.socket()\n", "bare: its code opens socket"),
        ("import os\nKEPT = os.pipe()\n", "bare: its code opens pipe"),
        ("import os\nKEPT = os.memfd_create('x')\n", "bare: its code opens a file that"),
        ("import mmap\nKEPT = mmap.mmap(-1, 4096)\n", "bare: its code maps memory"),
        (
            "import mmap\nKEPT = open('/etc/passwd', 'rb')\n"
            "MAP = mmap.mmap(KEPT.fileno(), 0, access=mmap.ACCESS_READ)\n",
            "template",
        ),
        ("import mmap\nKEPT = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)\n", "template"),
        ("import os\nKEPT = open(os.devnull, 'w')\n", "template"),
        ("import os\nSEEN = os.environ.get('SEED')\n", "bare: its code reads SEED"),
        ("import os\nSEEN = dict(os.environ)\n", "bare: its code reads SEED"),
        ("import os\nSEEN = os.environb.get(b'SEED')\n", "bare: its code reads SEED"),
        ("import os\nSEEN = dict(os.environb)\n", "bare: its code reads SEED"),
        ("import tempfile\nKEPT = tempfile.mkdtemp()\n", "bare: its code does not load in a"),
        ("open('state', 'w').close()\n", "bare: its code does not load in a"),
        ("import io, sys\nsys.stdout = sys.stderr = io.StringIO()\n", "template"),
        ("import sys\nsys.stdout.close()\n", "template"),
        ("import os\nSEEN = os.getenv('OTHER')\n", "template"),
        ("import os\nSEEN = os.getenvb(b'OTHER'), os.get_exec_path()\n", "template"),
    ],
    ids=[
        "thread", "thread of no name", "process", "process that ended", "socket", "pipe",
        "memory file", "shared memory", "mapped file", "private memory", "device",
        "variable", "all variables", "variable in bytes", "all variables in bytes",
        "temporary directory", "file", "output replaced", "output closed",
        "another variable", "others in bytes, with both kinds of PATH",
    ],
)  # fmt: skip
async def test_what_cannot_be_forked_is_loaded_afresh_and_says_why(
    walled: Bench, source: str, words: str
) -> None:
    """The fallback is visible."""
    project = walled.project({"tools.py": source + _TOOL})
    sandbox = await walled.start(project, environment_variables={"SEED": "7"})
    assert sandbox.start_mode.startswith(words)
    assert await value_of(sandbox, "one") == 1
    await walled.engine.stop([sandbox.instance_id])


_READERS = """
import io, os, zipfile
from aenv_ray.runtime import register_tool

HERE = os.path.dirname(__file__)
ROWS = open(f"{HERE}/rows.txt")
TASKS = ROWS.readline()
RAW = open(f"{HERE}/rows.txt", "rb", buffering=0)
RAW.seek(2)
ARCHIVE = zipfile.ZipFile(f"{HERE}/data.zip")
DIRECTORY = os.open(HERE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
NULL = open(os.devnull, "w")

@register_tool
def row() -> list[str]:
    NULL.write("x")
    NULL.flush()
    return [ROWS.readline(), RAW.read(2).decode(), ARCHIVE.open("a").read(2).decode()]

@register_tool
def names() -> list[str]:
    return sorted(os.listdir(DIRECTORY))
"""


@pytest.mark.parametrize("hides", [False, True])
async def test_instances_have_positions_of_their_own_in_files(either: Bench, hides: bool) -> None:
    """Invariant 7: what one instance reads from a file of the template is not lost for others."""
    deploy = {"hideSource": True} if hides else {}
    rows = "".join(f"{number}\n" for number in range(10_000))  # more than a buffer
    files = {"tools.py": _READERS, "rows.txt": rows}
    project = either.project(files, {"deployConfig": deploy})
    with zipfile.ZipFile(project / "src" / "data.zip", "w") as archive:
        archive.writestr("a", "data")
    for number in range(3):
        sandbox = await either.start(project)
        assert sandbox.start_mode == "template"
        assert await value_of(sandbox, "row") == ["1\n", "1\n", "da"], number
        assert await value_of(sandbox, "row") == ["2\n", "2\n", "da"], number
        assert "rows.txt" in await value_of(sandbox, "names"), number
    await either.engine.stop([row.instance_id for row in await either.engine.running()])


@pytest.mark.parametrize(
    "source",
    [
        "import tempfile\nKEPT = tempfile.TemporaryFile()\n",
        "import os\nPATH = '/tmp/aenv-fifo'\nos.mkfifo(PATH)\n"
        "KEPT = os.open(PATH, os.O_RDONLY | os.O_NONBLOCK)\nos.unlink(PATH)\n",
    ],
    ids=["written", "named pipe"],
)
async def test_files_that_instances_would_share_are_opened_afresh(
    either: Bench, source: str
) -> None:
    """Invariant 7: also without namespaces, where a template can write."""
    sandbox = await either.start(either.project({"tools.py": source + _TOOL}))
    assert sandbox.start_mode.startswith("bare: its code")
    assert await value_of(sandbox, "one") == 1
    await either.engine.stop([sandbox.instance_id])


async def test_arguments_are_a_reason_to_load_afresh(walled: Bench) -> None:
    source = "import sys\nSEEN = sys.argv[1:]\n" + _TOOL.replace("return 1", "return len(SEEN)")
    project = walled.project({"tools.py": source})
    sandbox = await walled.start(project, arguments=("--a", "b"))
    assert "arguments" in sandbox.start_mode
    assert await value_of(sandbox, "one") == 2
    await walled.engine.stop([sandbox.instance_id])


async def test_code_that_fails_only_in_the_instance_fails_its_start(walled: Bench) -> None:
    source = "import os\nif os.environ.get('SEED') == 'bad': raise RuntimeError('bad seed')\n"
    source += _TOOL
    project = walled.project({"tools.py": source})
    with pytest.raises(SandboxStartFailed, match="bad seed"):
        await walled.start(project, environment_variables={"SEED": "bad"})
    fine = await walled.start(project, environment_variables={"SEED": "good"})
    assert await value_of(fine, "one") == 1
    assert await walled.running() == {fine.instance_id}
    await walled.engine.stop([fine.instance_id])


# --- what is shown ----------------------------------------------------------------------------


@pytest.mark.namespaces
async def test_an_interpreter_below_tmp_exposes_nothing_else(
    own_node: Node, tmp_path: Path
) -> None:
    """Invariant 7: a sandbox's own /tmp covers an interpreter below /tmp; it is shown once more,
    without the sources of built-in environments and without what lies beside it."""
    site = own_node.root / "site"
    package = site / "aenv_ray"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(aenv_ray.__file__).parent, package, ignore=ignored)
    (own_node.root / "beside").write_text("another's")
    script = tmp_path / "start.py"
    script.write_text(
        "import asyncio, json, os, sys\nfrom pathlib import Path\n"
        "from aenv_ray.engines.process.engine import ProcessEngine\n"
        "from aenv_ray.testing.contract_bench import Bench, evaluate\n"
        "async def main(root, site):\n"
        "    engine = ProcessEngine('host-x', runtime_dir=root / 'r', data_dir=root / 'd',\n"
        f"        scope={SCOPE!r}, owner_pid=os.getppid())\n"
        "    sandbox = await Bench(engine, root).start()\n"
        "    source = (\n"
        "        'import os, aenv_ray.runtime\\n'\n"
        '        \'found = [os.path.join(d, n) for top in ("/tmp", "/.shown")\'\n'
        "        ' for d, ds, fs in os.walk(top) for n in (*ds, *fs)]\\n'\n"
        "        'result = [os.path.realpath(aenv_ray.runtime.__file__), found]')\n"
        "    print(json.dumps(await evaluate(sandbox, source)))\n"
        "    await engine.stop([sandbox.instance_id])\n"
        "    await engine.close()\n"
        "asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(own_node.root), str(site)],
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runtime, found = json.loads(done.stdout)
    assert runtime == str(package / "runtime" / "__init__.py")
    views = {path for path in found if path.endswith("/runtime/fork/jail.py")}
    checkout_too = Path(aenv_ray.__file__).is_relative_to("/tmp")
    # Where it is, and what that is shown from.
    assert len(views) == (4 if checkout_too else 2), views
    assert f"{package}/runtime/fork/jail.py" in views
    assert not [path for path in found if "/envs/" in path]
    private = (own_node.root / "beside", own_node.directory, own_node.data_dir / "environments")
    assert not [path for path in found if path.startswith(tuple(map(str, private)))]
