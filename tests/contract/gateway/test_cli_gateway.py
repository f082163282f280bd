"""The commands against a real gateway: its routes, a real hub on a real Redis, the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from aenv_ray.cli import up
from aenv_ray.cli.main import main
from aenv_ray.cli.terminal import config_file
from aenv_ray.config import settings
from aenv_ray.hub.records import Role
from aenv_ray.local_fabric import LocalFabric, Phase
from tests.conftest import without_rays_words
from tests.contract.gateway.gateway_bench import Bench, a_gateway

KEPT = ("--keep-alive", "--skip-health")  # what the engine here has for health, e2e tests show
AENV = [sys.executable, "-m", "aenv_ray.cli.main"]


@dataclass
class Served:
    """A gateway on a port of this machine, and its tokens."""

    url: str
    admin: str
    owner: str
    loop: asyncio.AbstractEventLoop
    bench: Bench


def _serve(root: Path, ready: Callable[[Served], None], done: threading.Event) -> None:
    async def run() -> None:
        async with a_gateway(root) as bench:
            await bench.gateway.open()
            sock = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(
                    bench.gateway.app, log_level="warning", lifespan="off", ws="websockets-sansio"
                )
            )
            serving = asyncio.create_task(server.serve([sock]))
            admin = await bench.token(Role.ADMIN, "root")
            owner = await bench.token(Role.PUBLISHER, "ann")
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            ready(Served(url, admin, owner, asyncio.get_running_loop(), bench))
            await asyncio.to_thread(done.wait)
            server.should_exit = True
            await serving
            sock.close()

    asyncio.run(run())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    is_up: Future[Served] = Future()
    done = threading.Event()
    root = tmp_path_factory.mktemp("g")

    def work() -> None:
        try:
            _serve(root, is_up.set_result, done)
        except Exception as exc:
            if is_up.done():
                raise
            is_up.set_exception(exc)

    thread = threading.Thread(target=work)
    thread.start()
    yield is_up.result(60)
    done.set()
    thread.join(60)


@pytest.fixture
def aenv(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Iterator[Callable[..., Any]]:
    """Run a command as ann; return what it printed as data."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config_file, "SYSTEM_FILE", tmp_path / "none")
    monkeypatch.setenv("AENV_SYSTEM_URL", served.url)
    monkeypatch.setenv("AENV_API_KEY", served.owner)
    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path / "data"))
    settings.cache_clear()

    def run(*words: str, code: int = 0, form: str = "json") -> Any:
        assert main([*words, *(["-o", form] if form else [])]) == code, capsys.readouterr().err
        run.out, run.err = map(without_rays_words, capsys.readouterr())  # type: ignore[attr-defined]
        if not run.out:  # type: ignore[attr-defined]
            return None
        read = {"json": json.loads, "yaml": yaml.safe_load}.get(form, str)
        return read(run.out)  # type: ignore[attr-defined]

    yield run
    settings.cache_clear()


def test_environments_are_listed_searched_and_shown_in_every_format(aenv):
    for form in ("json", "yaml"):
        (one,) = aenv("list", form=form)
        assert (one["name"], one["version"], one["status_name"]) == ("probe", "1.0.0", "Ready")
        assert aenv("search", "PROBE", form=form) == [one]
        assert aenv("search", "nothing", "such", form=form) == []
        assert aenv("get", "probe", form=form)["digest"] == one["digest"]
        assert aenv("get", "probe@1.0.0", "--versions", form=form)[0]["version"] == "1.0.0"
    assert aenv("list", form="table").splitlines()[0].split()[:3] == ["NAME", "VERSION", "STATUS"]
    aenv("list", "--name", "other", form="table")
    assert (aenv.out, aenv.err[:15]) == ("", "no environments")
    assert aenv("list", "--offset", "1") == []
    assert "environment" in aenv("get", "probe", form="table")


def test_every_instance_command_works(aenv):
    made = aenv("instance", "create", "probe", *KEPT, "--ttl", "5m", "--label", "run=a")
    assert made["status"] == "Running"
    assert f"engine: {made['engine']}\n" in aenv.err, "nobody named it"
    name = made["id"]
    assert [row["id"] for row in aenv("instance", "list", "--label", "run=a")] == [name]
    assert aenv("instance", "list", "-n", "probe", "--version", "9") == []
    assert aenv("instance", "get", name)["labels"] == {"run": "a"}
    assert name in aenv("instance", "list", form="table")
    before = made["deadline"]
    assert aenv("instance", "renew", name, "2h")["deadline"] > before
    assert aenv("instance", "delete", name, "--yes") == [{"id": name, "deleted": True}]
    assert aenv("instance", "list", "--status", "Running") == []
    aenv("instance", "get", name + "x", code=1)
    assert aenv.err.startswith("error: ")


def test_several_instances_are_created_at_once(aenv):
    made = aenv("instance", "create", "probe", "-n", "3", *KEPT)
    assert len({one["id"] for one in made}) == 3
    aenv("instance", "delete", *(one["id"] for one in made), "-y", form="")
    assert aenv.out.split() == [one["id"] for one in made]


def test_every_service_command_works_and_the_storage_outlives_the_service(aenv):
    options = ("--service-name", "notes", "--enable-storage", "--storage-size", "1Gi")
    resources = ("--cpu", "500m", "--memory", "1Gi", "--port", "8000", "-e", "KEY=secret")
    made = aenv("service", "create", "probe", *options, "--mount-path", "/data", *resources)
    assert (made["cpu"], made["memory"], made["port"]) == ("500m", "1Gi", 8000)
    shown = aenv("service", "get", "notes", form="table")
    for text in ("500m", "8000", f"1Gi at /data ({made['pvc_name']})"):
        assert text in shown
    assert "secret" not in shown
    changed = aenv("service", "update", "notes", "--storage-size", "2Gi", "--cpu", "")
    assert (changed["storage_size"], changed["cpu"], changed["memory"]) == ("2Gi", "", "1Gi")
    aenv("service", "update", "notes", "--replicas", "2", code=3)
    assert "a single writer" in aenv.err
    aenv("service", "update", "notes", code=2)
    aenv("service", "update", "notes", "--image", "other:1", code=3)
    assert "engine docker or kubernetes" in aenv.err
    aenv("service", "update", "notes", "--engine", "kubernetes", code=3)
    assert "a claim" in aenv.err
    assert aenv("service", "delete", "notes", "--yes") == {"id": "notes", "deleted": True}
    again = aenv("service", "create", "probe", *options[:3])
    assert (again["pvc_name"], again["storage_size"]) == (made["pvc_name"], "2Gi")
    aenv("service", "delete", "notes", "--delete-storage", "--yes", form="")
    assert aenv.out == "notes\n"
    without = aenv("service", "create", "probe", "--service-name", "notes", "--no-storage")
    assert without["pvc_name"] == ""
    aenv("service", "delete", "notes", "--yes")


def test_a_service_is_of_the_project_here_and_of_the_configs_owner(aenv, tmp_path, monkeypatch):
    """As AEnvironment's: without a name that of config.json, and the owner of the settings."""
    monkeypatch.chdir(tmp_path)
    aenv("service", "create", code=3)
    assert "has no config.json" in aenv.err
    (tmp_path / "config.json").write_text('{"name": "probe", "version": "1.0.0"}')
    aenv("config", "set", "owner", "bob")
    aenv("service", "create", "-s", "here", code=1)
    assert "cannot act for 'bob'" in aenv.err
    aenv("config", "set", "owner", "ann")
    made = aenv("service", "create", "-s", "here")
    assert (made["env"]["name"], made["owner"]) == ("probe", "ann")
    assert set(aenv("service", "logs", "here")) == {"id", "text"}
    aenv("service", "delete", "here", "--yes")


def test_refusals_of_the_gateway_are_readable(aenv, monkeypatch, served):
    aenv("get", "nowhere", code=1)
    assert "nowhere" in aenv.err
    aenv("instance", "create", "nowhere", "--keep-alive", code=1)
    aenv("instance", "create", "probe", "--ttl", "soon", code=3)
    assert "ttl" in aenv.err
    monkeypatch.setenv("AENV_API_KEY", "wrong")
    settings.cache_clear()
    aenv("list", code=1)
    assert "token" in aenv.err
    assert "wrong" not in aenv.err
    aenv("list", "--system-url", "http://127.0.0.1:1", code=1)
    assert "cannot be reached" in aenv.err
    assert aenv("list", "--api-key", served.admin)


def test_tokens_are_created_shown_once_and_revoked(aenv, served):
    made = aenv("token", "create", "--role", "owner", "--owner", "bob", "--api-key", served.admin)
    secret = made["token"]
    listed = aenv("token", "list", "--api-key", served.admin)
    assert made["id"] in {one["id"] for one in listed}
    assert secret not in aenv.out
    assert aenv("instance", "list", "--api-key", secret) == []
    aenv("token", "revoke", made["id"], "--yes", "--api-key", served.admin)
    listed = aenv("token", "list", "--api-key", served.admin)
    assert made["id"] not in {one["id"] for one in listed}
    aenv("token", "revoke", made["id"], "--yes", "--api-key", served.admin, code=1)
    assert "no such token" in aenv.err


def test_grants_are_set_and_recorded_in_the_audit_log(aenv, served):
    assert {"name": "probe", "owner": "ann", "right": "owner"} in aenv("grant", "probe")
    granted = aenv("grant", "probe", "bob", "publish")
    assert {"name": "probe", "owner": "bob", "right": "publish"} in granted
    assert "bob" not in [row["owner"] for row in aenv("grant", "probe", "bob", "none")]
    aenv("grant", "probe", "bob", code=2)
    assert "use, publish or none" in aenv.err
    log = aenv("hub", "audit", "-n", "2", "--api-key", served.admin)
    assert [(one["actor"], one["action"]) for one in log] == [
        ("ann", "grant.revoke"), ("ann", "grant.set"),
    ]  # fmt: skip
    aenv("hub", "audit", code=1)


def test_the_token_of_a_fabric_ends_with_it(aenv, served, capsys):
    """`aenv down` revokes it; where that was killed, the next `aenv up` with this directory."""

    def made() -> str:
        work = up.new_token(served.bench.hub)
        return asyncio.run_coroutine_threadsafe(work, served.loop).result(60)

    def fabric(token: str) -> LocalFabric:
        return LocalFabric(
            id="a", phase=Phase.UP, url=served.url, mcp_url=served.url, token=token,
            owns_ray=True, started_at=0.0, user="ann",
        )  # fmt: skip

    def may(token: str) -> bool:
        return main(["list", "--api-key", token, "-o", "json"]) == 0

    before = {row["id"] for row in aenv("token", "list", "--api-key", served.admin)}
    first, second = made(), made()
    assert (may(first), may(second)) == (False, True)
    up.revoke_token(fabric(second))
    up.revoke_token(fabric(""))
    up.revoke_token(fabric(second).model_copy(update={"url": "http://127.0.0.1:1"}))
    assert not may(second)
    assert may(served.owner)
    capsys.readouterr()
    assert {row["id"] for row in aenv("token", "list", "--api-key", served.admin)} == before


def test_hub_and_status_show_what_runs(aenv, served):
    assert aenv("hub", "status", "--api-key", served.admin)
    assert aenv("status", "--api-key", served.admin)["state"] == "up"
    assert aenv("status", "--system-url", "http://127.0.0.1:1", code=1)["state"] == "down"


# --- holding -----------------------------------------------------------------------------------


class Held:
    """An ``aenv instance create`` that holds its instance, in its own session."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*AENV, "instance", "create", "probe", "--skip-health", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.id = self.process.stdout.readline().strip()

    def finish(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_held_instance_is_released_by_every_signal_that_asks_us_to_end(number, aenv):
    held = Held()
    assert held.id.startswith("probe-")
    assert aenv("instance", "get", held.id)["status"] == "Running"
    os.killpg(held.process.pid, number)  # what a terminal does
    code, err = held.finish()
    assert (code, err.splitlines()[-1]) == (0, f"released {held.id}")
    assert held.id not in {one["id"] for one in aenv("instance", "list", "--status", "Running")}


def test_a_held_instance_that_ends_by_itself_ends_the_command(aenv):
    held = Held()
    aenv("instance", "delete", held.id, "--yes")
    code, err = held.finish()
    assert code == 0
    assert f"{held.id} ended" in err


def test_a_create_that_is_interrupted_leaves_no_instance(aenv, served):
    fabric = served.bench.fabric
    before = len(fabric.created)
    served.loop.call_soon_threadsafe(fabric.gate.clear)
    served.loop.call_soon_threadsafe(fabric.asked.clear)
    process = subprocess.Popen(
        [*AENV, "instance", "create", "probe", "--keep-alive"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    asyncio.run_coroutine_threadsafe(fabric.asked.wait(), served.loop).result(60)
    os.killpg(process.pid, signal.SIGINT)
    served.loop.call_soon_threadsafe(fabric.gate.set)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert len(fabric.created) <= before + 1, "never made twice"
    assert aenv("instance", "list", "--status", "Running") == []


def test_a_create_that_still_waits_for_room_is_undone_without_waiting_for_it(aenv, served):
    fabric = served.bench.fabric
    served.loop.call_soon_threadsafe(fabric.gate.clear)
    served.loop.call_soon_threadsafe(fabric.asked.clear)
    process = subprocess.Popen(
        [*AENV, "instance", "create", "probe", "--keep-alive"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        asyncio.run_coroutine_threadsafe(fabric.asked.wait(), served.loop).result(60)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=40)  # a repeated create waits for 60 s at most
    finally:
        served.loop.call_soon_threadsafe(fabric.gate.set)
    assert (process.returncode, out) == (130, ""), err
    assert aenv("instance", "list", "--status", "Running") == []

    async def settled() -> None:
        while served.bench.gateway.creator.in_progress:  # noqa: ASYNC110  # has no event
            await asyncio.sleep(0.01)
        assert await fabric.list_instances() == [], "what the create started goes, too"

    asyncio.run_coroutine_threadsafe(settled(), served.loop).result(60)


# --- publishing --------------------------------------------------------------------------------


@pytest.fixture
def todo(tmp_path: Path, capsys: Any) -> Path:
    assert main(["init", "todo", "-w", str(tmp_path)]) == 0
    capsys.readouterr()
    return tmp_path / "todo"


def test_a_pushed_project_can_be_pulled(aenv, todo, tmp_path):
    dry = aenv("push", str(todo), "--dry-run")
    assert "config.json" in dry["files"]
    assert "guess" in {one["name"] for one in dry["functions"]}
    assert aenv("list", "--name", "todo") == [], "a dry run sends nothing"
    pushed = aenv("push", str(todo))
    assert (pushed["version"], pushed["digest"]) == ("1.0.0", dry["digest"])
    assert aenv("push", str(todo))["digest"] == dry["digest"], "the same again"
    back = Path(aenv("pull", "todo", "-w", str(tmp_path / "back"))["path"])
    for path in (p for p in back.rglob("*") if p.is_file()):
        assert path.read_bytes() == (todo / path.relative_to(back)).read_bytes()
    assert (back / "config.json").is_file()
    aenv("pull", "todo", "-w", str(tmp_path / "back"), code=3)
    assert "--force" in aenv.err
    (back / "mine.txt").write_text("kept")
    (back / "config.json").write_text("changed")
    aenv("pull", "todo", "-w", str(tmp_path / "back"), "--force")
    assert (back / "mine.txt").read_text() == "kept"
    assert json.loads((back / "config.json").read_text())["name"] == "todo"


def test_another_version_is_another_environment_and_the_project_stays_as_it_is(aenv, todo):
    before = (todo / "config.json").read_bytes()
    assert aenv("push", str(todo), "--version", "1.10.0")["version"] == "1.10.0"
    assert aenv("push", str(todo), "--version", "1.9.0")["version"] == "1.9.0"
    assert (todo / "config.json").read_bytes() == before
    versions = [one["version"] for one in aenv("get", "todo", "--versions")]
    assert versions[:2] == ["1.10.0", "1.9.0"]
    assert aenv("get", "todo")["version"] == "1.10.0"
    (todo / "src" / "more.py").write_text("MORE = 1\n")
    aenv("push", str(todo), "--version", "1.9.0", "--force", code=1)
    assert "never changes" in aenv.err
    assert aenv("release", "todo@1.9.0")["status_name"] == "Released"
    aenv("release", "todo@1.9.0", code=1)
    aenv("delete", "todo", "--yes", code=3)
    assert aenv("delete", "todo@1.10.0", "--yes")["deleted"]
    assert "1.10.0" not in {one["version"] for one in aenv("get", "todo", "--versions")}


def test_a_secret_is_not_published_by_accident(aenv, todo):
    (todo / "src" / "id_rsa").write_text("key\n")
    aenv("push", str(todo), "--version", "2.0.0", code=3)
    assert "src/id_rsa" in aenv.err
    assert "--allow-secret" in aenv.err
    assert aenv("list", "--name", "todo", "--status", "Ready") is not None
    allowed = ("push", str(todo), "--version", "2.0.0", "--allow-secret", "src/id_rsa")
    aenv(*allowed, "--dry-run")
    assert "2.0.0" not in {one["version"] for one in aenv("list", "--name", "todo")}
    assert aenv(*allowed)["version"] == "2.0.0"
