"""An environment is loaded in a sandbox to see what it offers, which is then published."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv_ray.actors.fabric.publishing import entry_of, inspect, publish
from aenv_ray.actors.host.fresh_sandbox import fresh_sandbox
from aenv_ray.clock import SystemClock
from aenv_ray.errors import (
    ArtifactQuotaExceeded,
    ArtifactStoreDenied,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    SandboxStartFailed,
    VersionConflict,
)
from aenv_ray.hub import packing
from aenv_ray.hub.artifacts import ArtifactStore, DirectoryFiles
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import EnvironmentStatus, FunctionSchema
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import request, value_of, write_project
from tests.contract.hub.hub_contract import entry
from tests.contract.hub.redis_servers import emptied
from tests.ray.faults import eventually_empty

KITCHEN_SINK = Path(__file__).parents[2] / "fixtures" / "projects" / "kitchen-sink"
TOOLS = """
import os, pathlib
from aenv_ray.runtime import *

os.environ["SEEN_BY_THE_PUBLISHER"] = "yes"


@register_tool
def say(text: str, times: int = 1) -> str:
    "Say it."
    return text * times


@register_function(endpoint="/setup", method="PUT")
def setup(seed: int) -> dict: ...


@register_reward
def score(answer: str = "") -> float:
    return 1.0


@register_health
def health() -> dict:
    raise RuntimeError("nothing is called")
"""
CONFIG = {"deployConfig": {"network": "none"}}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_project(tmp_path / "p", {"tools.py": TOOLS}, CONFIG)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Invariant 3: launcher, template, sandbox and files are gone when it returned."""
    yield
    assert not list(Path("/tmp").glob(f"aenv-fresh-{os.getpid()}-*"))
    eventually_empty(_started_processes, 10.0)  # a killed one may be listed for a moment


def _started_processes() -> list[bytes]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (directory / "cmdline").read_bytes()
            if f"aenv-fresh-{os.getpid()}-".encode() in words:
                found.append(words)
    return found


# --- looking --------------------------------------------------------------------------------------


async def test_every_kind_is_seen_with_its_schema(made: Path) -> None:
    found = await inspect(project.load(made))
    assert found.note == ""
    by_name = {function.name: function for function in found.functions}
    assert list(by_name) == ["say", "setup", "score", "health"]
    say = by_name["say"]
    assert (say.kind, say.description) == ("tool", "Say it.")
    assert say.input_schema["properties"]["times"]["type"] == "integer"
    assert say.input_schema["required"] == ["text"]
    assert (by_name["setup"].endpoint, by_name["setup"].method) == ("/setup", "PUT")
    assert by_name["setup"].input_schema["properties"]["seed"]["type"] == "integer"
    assert by_name["score"].kind == "reward"
    assert by_name["health"].kind == "health"


async def test_our_own_process_loads_no_code_of_a_project(made: Path) -> None:
    """A publisher's code runs in a sandbox, never where tokens and stores are."""
    before = set(sys.modules)
    await inspect(project.load(made))
    assert "SEEN_BY_THE_PUBLISHER" not in os.environ
    assert not {name for name in set(sys.modules) - before if name == "tools"}


async def test_everything_that_the_runtime_registers_is_seen() -> None:
    found = await inspect(project.load(KITCHEN_SINK))
    kinds = {function.kind for function in found.functions}
    assert kinds == {"tool", "function", "reward", "health"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module\n", ["tools.py", "line 1", "no_such_module"]),
        ("x = 1\n", ["registers no tool"]),
        ("def f(:\n", ["tools.py", "SyntaxError"]),
        ("import sys; sys.exit(3)\n", ["tools.py", "SystemExit"]),
        ("import os; os._exit(3)\n", ["exit"]),
    ],
)
async def test_the_error_says_why_code_does_not_load(
    tmp_path: Path, source: str, words: list[str]
) -> None:
    made = write_project(tmp_path / "p", {"tools.py": source}, CONFIG)
    with pytest.raises(SandboxStartFailed) as raised:
        await inspect(project.load(made))
    for word in words:
        assert word in raised.value.message, raised.value.message


async def test_code_that_never_finishes_loading_times_out(tmp_path: Path) -> None:
    """Invariants 3 and 9."""
    hanging = "import threading; threading.Event().wait()\n"
    made = write_project(tmp_path / "p", {"tools.py": hanging}, CONFIG)
    with pytest.raises(
        DeadlineExceeded, match=r"the code of made@1\.0\.0 did not load within 1\.5 s"
    ):
        await inspect(project.load(made), timeout_s=1.5)


async def test_cancelling_ends_what_was_started(tmp_path: Path) -> None:
    """Invariant 11."""
    hanging = "import threading; threading.Event().wait()\n"
    made = write_project(tmp_path / "p", {"tools.py": hanging}, CONFIG)
    task = asyncio.create_task(inspect(project.load(made)))
    done, _ = await asyncio.wait([task], timeout=1)
    assert not done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_requirements_are_installed_before_code_is_loaded(tmp_path: Path) -> None:
    """In the project's own virtual environment."""
    source = TOOLS.replace("import os, pathlib", "import os, six")
    made = write_project(tmp_path / "p", {"tools.py": source}, CONFIG)
    (made / "requirements.txt").write_text("six\n")
    found = await inspect(project.load(made))
    assert {function.name for function in found.functions} >= {"say", "score"}


async def test_projects_without_code_are_not_inspected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"name": "image-only"}))
    found = await inspect(project.load(tmp_path))
    assert (found.functions, bool(found.note)) == ((), True)


async def test_code_that_needs_its_image_is_not_seen_and_the_reason_is_noted(
    tmp_path: Path,
) -> None:
    config = {"deployConfig": {"engine": "docker", "network": "internet"}}
    made = write_project(tmp_path / "p", {"tools.py": "import in_the_image\n"}, config)
    found = await inspect(project.load(made))
    assert found.functions == ()
    assert "in_the_image" in found.note
    (made / "src" / "tools.py").write_text(TOOLS)
    assert (await inspect(project.load(made))).functions


@pytest.mark.parametrize(
    "deploy",
    [
        {"network": "internet"},
        {"network": "allowlist", "allow": ["pypi.org:443"]},
        {"podTemplate": "DualContainer"},
        {"engine": "docker", "network": "host"},
    ],
)
async def test_what_only_a_container_has_does_not_keep_code_from_being_seen(
    tmp_path: Path, deploy: dict[str, object]
) -> None:
    made = write_project(tmp_path / "p", {"tools.py": TOOLS}, {"deployConfig": deploy})
    assert len((await inspect(project.load(made))).functions) == 4


# --- publishing -----------------------------------------------------------------------------------


@pytest.fixture
async def hub(module_redis: RedisServer) -> AsyncIterator[HubCore]:
    server = await emptied(module_redis)
    hub = HubCore(server.connect(), SystemClock(), where="test")
    yield hub
    await hub.close()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(DirectoryFiles(tmp_path / "artifacts", SystemClock()))


async def test_a_published_version_is_the_project_that_was_packed(
    tmp_path: Path, made: Path, hub: HubCore, store: ArtifactStore
) -> None:
    """Invariant 6: from the directory to what an instance unpacks, one content."""
    config = {"description": "d", "tags": ["a"], "theirs": {"kept": 1}, **CONFIG}
    (made / "config.json").write_text(json.dumps({"name": "made", "version": "2.0.0", **config}))
    package = packing.pack(project.load(made))
    where = {"hub": hub, "store": store, "projects_dir": tmp_path / "projects", "policy": Policy()}
    kept = await publish(package.data, "ada", **where)
    assert await hub.environment("made") == kept
    assert (kept.digest, kept.archive) == (package.source.digest, package.sha256)
    assert (kept.owner, kept.description, kept.tags) == ("ada", "d", ("a",))
    assert kept.config["theirs"] == {"kept": 1}
    assert kept.status is EnvironmentStatus.READY
    assert [f.name for f in kept.functions] == ["say", "setup", "score", "health"]
    data = await store.read(kept.archive)
    assert len(data) == kept.archive_bytes
    unpacked = project.unpack(data, kept.digest, tmp_path / "node")
    assert project.load(unpacked).digest == kept.digest
    assert (await publish(package.data, "ada", **where)).created_at == kept.created_at
    (made / "src" / "more.py").write_text("")
    with pytest.raises(VersionConflict):
        await publish(project.load(made).archive(), "ada", **where)


async def test_what_does_not_fit_the_quota_of_its_publisher_is_not_stored(
    tmp_path: Path, made: Path, hub: HubCore, store: ArtifactStore
) -> None:
    """Invariant 7: the archive counts as it is stored, however small it was sent."""
    (made / "src" / "zeros.bin").write_bytes(bytes(200_000))
    sent = gzip.compress(project.load(made).archive())
    where = {"hub": hub, "store": store, "projects_dir": tmp_path / "projects", "policy": Policy()}
    with pytest.raises(ArtifactQuotaExceeded) as caught:
        await publish(sent, "ada", artifact_quota_bytes=200_000, **where)
    assert "AENV_ARTIFACT_QUOTA" in str(caught.value.hint)
    assert await hub.artifacts_held("ada") == (0, 0)
    assert not [file for file in (tmp_path / "artifacts").rglob("*") if file.is_file()]
    kept = await publish(sent, "ada", artifact_quota_bytes=400_000, **where)
    assert await hub.artifacts_held("ada") == (kept.archive_bytes, 1)


@pytest.mark.namespaces
@pytest.mark.parametrize("policy", [Policy(), STRICT], ids=["open", "strict"])
async def test_inspected_code_reaches_the_node_only_where_the_policy_allows_it(
    tmp_path: Path, hub: HubCore, store: ArtifactStore, policy: Policy
) -> None:
    """Invariants 7 and 13: a pushed project that names no network is loaded beside the gateway."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import socket
from aenv_ray.runtime import register_tool
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5).close()
    found = "reached"
except OSError:
    found = "walled"
register_tool(name=found)(lambda: 0)
"""
        root = write_project(tmp_path / "spy", {"spy.py": code}, {"name": "spy"})
        data = project.load(root).archive()
        entry = await publish(
            data, "eve", hub=hub, store=store, projects_dir=tmp_path / "projects", policy=policy
        )
    assert [one.name for one in entry.functions] == ["reached" if policy == Policy() else "walled"]


@pytest.mark.parametrize("what", ["broken code", "no room", "no archive", "a secret"])
async def test_what_cannot_be_published_leaves_no_version(
    tmp_path: Path, made: Path, hub: HubCore, store: ArtifactStore, what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if what == "broken code":
        (made / "src" / "tools.py").write_text("import no_such_module\n")
    if what == "a secret":
        (made / ".env").write_text("TOKEN=secret\n")
    data = b"no archive" if what == "no archive" else project.load(made).archive()
    if what == "no room":

        def refuse(_: Path) -> None:
            raise ArtifactStoreDenied("no")

        monkeypatch.setattr(store._files, "begin", lambda: refuse(made))
    with pytest.raises((SandboxStartFailed, ArtifactStoreDenied, ConfigError)):
        await publish(
            data, "ada", hub=hub, store=store, projects_dir=tmp_path / "projects", policy=Policy()
        )
    assert await hub.versions("made") == ()


async def test_nothing_is_loaded_under_the_name_of_another_owner(
    tmp_path: Path, made: Path, hub: HubCore, store: ArtifactStore
) -> None:
    """Invariant 15: it is refused before its code runs, so that the error is not of its code."""
    (made / "src" / "tools.py").write_text("import no_such_module\n")
    source = project.load(made)
    await hub.push(entry(source.config.name, "0.1.0", owner="alice"))
    where = {"hub": hub, "store": store, "projects_dir": tmp_path / "projects", "policy": Policy()}
    with pytest.raises(Forbidden):
        await publish(source.archive(), "bob", **where)
    with pytest.raises(SandboxStartFailed):
        await publish(source.archive(), "bob", is_admin=True, **where)
    assert await hub.artifacts_held("bob") == (0, 0)


async def test_a_publisher_may_allow_files_that_look_like_secrets(
    tmp_path: Path, made: Path, hub: HubCore, store: ArtifactStore
) -> None:
    (made / "tests").mkdir()
    (made / "tests" / "id_rsa").write_text("of no server\n")
    data = project.load(made).archive()
    where = {"hub": hub, "store": store, "projects_dir": tmp_path / "projects", "policy": Policy()}
    with pytest.raises(ConfigError, match="tests/id_rsa") as raised:
        await publish(data, "ada", **where)
    assert "of no server" not in f"{raised.value.message} {raised.value.hint}"
    assert (await publish(data, "ada", **where, allow=["tests/*"])).name == "made"


def test_an_unknown_status_is_refused(made: Path) -> None:
    (made / "config.json").write_text(json.dumps({"name": "made", "status": "Splendid"}))
    functions = (FunctionSchema(kind="tool", name="say"),)
    with pytest.raises(ConfigError, match="Splendid") as raised:
        entry_of(packing.pack(project.load(made)), functions, None)
    assert "Ready" in str(raised.value.hint)


# --- projects written for AEnvironment ------------------------------------------------------------

PROJECTS = KITCHEN_SINK.parent


@pytest.mark.parametrize(
    ("name", "offers"),
    [
        (
            "weather-demo",
            {"tool get_weather", "function get_weather_func", "reward is_good_weather"},
        ),
        ("mini-terminal", {"tool execute_command"}),
    ],
)
async def test_projects_for_aenvironment_are_packed_and_seen_as_they_are(
    name: str, offers: set[str]
) -> None:
    source = project.load(PROJECTS / name)
    package = packing.pack(source)
    found = await inspect(source)
    assert {f"{f.kind} {f.name}" for f in found.functions} == offers
    entry = entry_of(package, found.functions, "ada")
    assert entry.config["codeUrl"] == "oss://xxx"
    assert entry.config["testConfig"] == {"script": "pytest xxx"}


async def test_projects_for_aenvironment_serve_as_they_are() -> None:
    async with fresh_sandbox(project.load(PROJECTS / "weather-demo"), lifetime_s=60) as sandbox:
        assert await value_of(sandbox, "get_weather", city="Oslo") == {
            "city": "Oslo", "temperature": -3, "climate": "mild",
        }  # fmt: skip
        reward = await request(sandbox, "aenv/reward", {"arguments": {"city": "Oslo"}})
        assert reward is False
    async with fresh_sandbox(project.load(PROJECTS / "mini-terminal"), lifetime_s=60) as sandbox:
        await value_of(sandbox, "execute_command", command="cd /tmp; word=kept")
        found = await value_of(sandbox, "execute_command", command="echo $word in $PWD")
        assert found == {"output": ["kept in /tmp\n", True], "returncode": 0}
