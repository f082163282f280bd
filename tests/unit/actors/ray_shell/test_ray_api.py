"""How Ray's failures become ours."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from aenv_ray.actors.ray_shell import ray_api, ray_start
from aenv_ray.errors import FabricUnavailable


@pytest.mark.parametrize(
    ("address", "words", "hint"),
    [(None, "a local Ray cannot be started", "short of"), ("auto", "Ray at auto", "RAY_ADDRESS")],
)
def test_a_ray_that_does_not_come_up_is_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, words: str, hint: str
) -> None:
    """Ray raises a bare `Exception` when its processes take too long."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FabricUnavailable, match=f"{words}.*timed out during startup") as raised:
        ray_api.ensure_ray(address)
    assert hint in str(raised.value.hint)
    assert raised.value.retryable


def test_a_full_disk_is_named_as_what_a_local_ray_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc/self")  # a filesystem without room
    assert ray_start.start_hint().startswith("/proc/self has only 0 KiB left: ")
    monkeypatch.setenv("RAY_TMPDIR", "/no/such/place")
    assert ray_start.start_hint().endswith("/no/such/place/ray/session_latest/logs")


HOMES = ("/proc/no-home", "writable")
GIVEN = (None, "of-the-user")
CARRY = """
import json, os, sys
from ray import _raylet  # what takes its time, once
from aenv_ray.actors.ray_shell.ray_token import carry_token

for changes in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:  # a process for each: Ray remembers a token that it has found
        os.environ |= changes
        carry_token()
        print(json.dumps(os.environ.get("RAY_AUTH_TOKEN", "")), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], str]:
    """Return the tokens that users of each kind carry."""
    users = list(itertools.product(HOMES, GIVEN))
    changes = []
    for home, given in users:
        own = str(tmp_path_factory.mktemp("home")) if home == "writable" else home
        changes.append({"HOME": own} | ({} if given is None else {"RAY_AUTH_TOKEN": given}))
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", CARRY, json.dumps(changes)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    return dict(zip(users, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("home", HOMES)
def test_a_user_who_cannot_keep_a_token_carries_one(
    carried: dict[tuple[str, str | None], str], home: str, given: str | None
) -> None:
    """Ray itself does not start then; with a home it makes one there, which others find."""
    token = carried[home, given]
    assert token == given if given is not None else bool(token) == (home != "writable")


def test_a_named_ray_where_nothing_listens_is_given_up_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray_start.await_listener(address)
        ray_start.await_listener(f"ray://{address}")
    with pytest.raises(FabricUnavailable, match=f"no Ray listened at {address}") as raised:
        ray_start.await_listener(address, patience_s=0)
    assert "RAY_ADDRESS" in str(raised.value.hint)


@pytest.mark.parametrize("address", ["auto", "local", "nonsense", "host:name", "a:99999", ":1", ""])
def test_only_a_host_and_a_port_are_tried(address: str) -> None:
    ray_start.await_listener(address, patience_s=0)


def test_a_long_directory_for_temporary_files_does_not_stop_a_local_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its sockets lie below that directory, and their paths have a limit."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert ray_start.short_directory() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    assert ray_start.short_directory() == "/tmp/ray"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_start.short_directory() is None


def test_routine_warnings_of_a_starting_ray_are_logged_as_info(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who starts Ray through us sees its routine notices only with --verbose."""
    records: list[logging.LogRecord] = []
    # Not caplog's: whether it has records of "ray", which may not propagate, depends on versions.
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    for name in ("ray", "aenv_ray"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
        caplog.set_level(logging.INFO, logger=name)
    token = logging.getLogger("ray._private.authentication.authentication_token_setup")
    worker = logging.getLogger("ray._private.worker")
    with ray_api.quiet_start():
        token.warning("Token authentication is enabled for this Ray cluster.")
        token.warning("Token authentication is disabled for this Ray cluster.")
        worker.warning("SIGTERM handler is not set because of the thread.")
    worker.warning("SIGTERM handler is not set because of the thread.")
    assert [(r.name.partition(".")[0], r.levelname, r.getMessage()) for r in records] == [
        ("aenv_ray", "INFO", "Ray: Token authentication is enabled for this Ray cluster."),
        ("ray", "WARNING", "Token authentication is disabled for this Ray cluster."),
        ("aenv_ray", "INFO", "Ray: SIGTERM handler is not set because of the thread."),
        ("ray", "WARNING", "SIGTERM handler is not set because of the thread."),
    ]


@pytest.mark.parametrize(
    ("kept", "draining"),
    [
        (None, {}),
        ('{"a": true, "b": false}', {"a": True, "b": False}),
        ('["a", "b"]', {"a": False, "b": False}),  # of an earlier version
    ],
)
def test_draining_nodes_are_those_that_any_version_stored(
    monkeypatch: pytest.MonkeyPatch, kept: str | None, draining: dict[str, bool]
) -> None:
    monkeypatch.setattr(ray_api, "stored_value", lambda _: kept)
    assert ray_api.draining_nodes() == draining


def test_what_an_actor_asked_of_ray_in_vain_is_typed() -> None:
    """The controller asks the head for the nodes; a head that is away must not end a sampling."""
    cause = ray.exceptions.RpcError("failed to connect to all addresses")
    raised_by_actor = ray.exceptions.RayTaskError("shared_hosts", "traceback", cause)
    typed = pytest.raises(FabricUnavailable, match="the shared hosts: failed to connect")
    with typed, ray_api.translated("the shared hosts"):
        raise raised_by_actor.as_instanceof_cause()
    dead = ray.exceptions.ActorDiedError()  # of another actor
    with pytest.raises(FabricUnavailable) as raised, ray_api.translated("the shared hosts"):
        raise ray.exceptions.RayTaskError("call", "traceback", dead).as_instanceof_cause()
    assert not ray_api.is_of_a_dead_actor(raised.value), "the called actor lives"


def test_only_a_running_ray_of_this_user_is_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Ray of another user could run code in this process."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_start.of_ray_start() is None
    file, address = tmp_path / "ray" / "ray_current_cluster", "127.0.0.1:6379"
    file.parent.mkdir()
    file.write_text(f"{address}\n")

    def run(command: list[str], uid: int) -> None:
        process = SimpleNamespace(
            cmdline=lambda: command, uids=lambda: SimpleNamespace(real=uid, effective=uid)
        )
        monkeypatch.setattr(psutil, "process_iter", lambda: [process])

    raylet = ["/opt/ray/raylet", "--node_id=1", f"--gcs-address={address}"]
    run(raylet, os.getuid())
    assert ray_start.of_ray_start() == address
    run(raylet, os.getuid() + 1)
    assert ray_start.of_ray_start() is None
    run(["/opt/ray/raylet", f"--gcs-address={address}1"], os.getuid())
    assert ray_start.of_ray_start() is None, "it has ended, and there is another one"
    run(raylet, os.getuid())
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert ray_start.of_ray_start() is None, "another user may have placed the link"
    file.unlink()
    os.mkfifo(file)
    assert ray_start.of_ray_start() is None
