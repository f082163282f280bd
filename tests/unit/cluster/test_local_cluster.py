"""The script that makes a machine a node of a cluster: what it starts, with which settings."""

from __future__ import annotations

import configparser
import os
import re
import signal
import socket
import stat
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.ray.nodes.machines import LOCAL, SCRIPT, load_script

WORKER = {1: "/ray/raylet/raylet --args"}
HEAD = {**WORKER, 2: "/ray/gcs/gcs_server --args"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, in an environment that says nothing."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "AENV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "private" / "token"))
    return load_script()


def test_the_head_makes_the_token_once_and_a_worker_never(node: ModuleType) -> None:
    with pytest.raises(node.Failure, match="copy that file from the head"):
        node.ensure_token(may_make=False)
    path = node.ensure_token(may_make=True)
    text = path.read_text()
    assert len(text) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert node.ensure_token(may_make=True).read_text() == text


def test_a_head_keeps_its_state_in_the_redis_of_the_hub(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_REDIS_URL", "rediss://me:p%40ss@redis.example:6390/2")
    monkeypatch.setenv("AENV_REDIS_PREFIX", "team")
    environment = node.node_environment("node", is_head=True)
    assert environment["RAY_REDIS_ADDRESS"] == "rediss://redis.example:6390"
    assert environment["RAY_external_storage_namespace"] == "team-ray"
    command = node.ray_command(None, 6380, environment)
    assert {"--redis-username=me", "--redis-password=p@ss"} <= set(command)
    worker = node.node_environment("node", is_head=False)
    assert "RAY_REDIS_ADDRESS" not in worker
    assert not any("p@ss" in word for word in node.ray_command("head:6380", 6380, worker))


@pytest.mark.parametrize("url", ["unix:///redis.sock", "redis+sentinel://a:1/s", "redis://"])
def test_a_redis_that_rays_head_cannot_use_is_refused_in_words(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AENV_REDIS_URL", url)
    with pytest.raises(node.Failure, match="redis://"):
        node.node_environment("node", is_head=True)


def test_a_worker_joins_with_its_slots(node: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_SLOTS", "64")
    monkeypatch.setenv("AENV_CPUS", "16")
    node.ensure_token(may_make=True)
    command = node.ray_command("head:6380", 6380, node.node_environment("node", is_head=False))
    assert {"--address=head:6380", "--num-cpus=16", '--resources={"env_slot": 64}'} <= set(command)
    assert "--head" not in command


def test_only_the_note_of_the_same_head_is_forgotten(node: ModuleType, tmp_path: Path) -> None:
    note = tmp_path / "ray_current_cluster"
    for port, is_left in ((6399, True), (6380, False)):
        note.write_text("192.0.2.1:6380")
        node.forget_address({"RAY_TMPDIR": str(tmp_path)}, port)
        assert note.exists() is is_left


@pytest.mark.parametrize("address", ["", "head", "head:", ":6380", "head:port"])
def test_a_worker_is_told_what_an_address_is(node: ModuleType, address: str) -> None:
    """Under systemd a missing AENV_HEAD is an empty argument."""
    with pytest.raises(node.Failure, match="HOST:PORT"):
        node.start("node", address, foreground=False)


def test_of_what_ray_said_the_error_is_told(node: ModuleType) -> None:
    """Its output and its errors are written by turns: the last line may say nothing."""
    said = "Traceback …\n  File …\nValueError: port 16380 is taken\nINFO: Local node IP"
    assert node.reason(said) == "ValueError: port 16380 is taken"
    assert node.reason("a\nb\nc\nd\ne") == "b | c | d | e"
    assert node.reason("") == "it ended without output"


@pytest.mark.parametrize(("address", "role"), [("other:6380", "head"), (None, "worker")])
def test_a_node_that_is_up_in_the_other_role_is_left_alone(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str | None, role: str
) -> None:
    up = HEAD if role == "head" else WORKER
    monkeypatch.setattr(node, "processes", lambda name: up)
    with pytest.raises(node.Failure, match=f"up as a {role}"):
        node.bring_up("node", address, 6380)


def test_a_head_that_lost_its_control_plane_is_not_up(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of Redis; it is started again, and systemd learns of it."""
    monkeypatch.setattr(node, "processes", lambda name: {7: "/ray/raylet --port=1 --head"})
    assert not node.is_up("node", is_head=None)
    assert not node.is_up("node", is_head=True)
    assert node.status("node") == 1


@pytest.mark.parametrize(("address", "up"), [("h:1", WORKER), (None, HEAD)])
def test_a_node_that_is_up_is_not_started_again(
    node: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    address: str | None,
    up: dict[int, str],
) -> None:
    monkeypatch.setenv("AENV_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(node, "processes", lambda name: up)
    monkeypatch.setattr(node, "start_ray", lambda *_: pytest.fail("it was started"))
    node.ensure_token(may_make=True)
    node.start("node", address, foreground=False)


def test_a_raylet_leaves_before_the_head_ends(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told together they wait for each other. Ours see the end of Ray and are not told at all."""
    left = {1: "/ray/gcs/gcs_server", 2: "/ray/raylet/raylet", 3: "python -m aenv_ray.x"}
    told: list[int] = []

    def end(pid: int, number: int) -> None:
        del number
        told.append(pid)
        del left[pid]
        if len(left) == 1:
            left.clear()

    monkeypatch.setattr(node, "processes", lambda name: dict(left))
    monkeypatch.setattr(node.os, "kill", end)
    node.stop("node")
    assert told == [2, 1]


def test_a_head_without_its_control_plane_does_not_wait_for_its_raylet(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of Redis, a raylet that is told to end waits for a head in vain."""
    left = {2: "/ray/raylet/raylet --head", 4: "ray::DashboardAgent"}
    told: list[tuple[int, int]] = []

    def end(pid: int, number: int) -> None:
        told.append((pid, number))
        if number == signal.SIGKILL:
            del left[pid]

    for name in ("LEAVE_S", "TERM_S", "KILL_S"):
        monkeypatch.setattr(node, name, 0.0)
    monkeypatch.setattr(node, "processes", lambda name: dict(left))
    monkeypatch.setattr(node.os, "kill", end)
    node.stop("node")
    assert told == [(2, signal.SIGKILL), (4, signal.SIGKILL)]


def test_systemd_is_told_that_the_node_is_up(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("notify")
        monkeypatch.setenv("NOTIFY_SOCKET", "notify")
        node.tell_systemd()
        assert systemd.recv(100) == b"READY=1"
    assert "NOTIFY_SOCKET" not in node.node_environment("node", is_head=True)


def test_every_setting_that_the_script_reads_is_in_its_file() -> None:
    read = set(re.findall(r'"(AENV_[A-Z_]+|RAY_AUTH_TOKEN_PATH)"', SCRIPT.read_text()))
    told = (LOCAL / "node.env").read_text()
    internal = {"AENV_CLUSTER_NODE", "AENV_REDIS_PREFIX", "AENV_RUNTIME_DIR"}
    assert {name for name in read - internal if name not in told} == set()


@pytest.mark.parametrize("role", ["head", "worker"])
def test_the_units_run_the_script_and_give_it_time_to_end(role: str) -> None:
    text = (LOCAL / f"aenv-ray-{role}.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert f"node.py {role}" in service["ExecStart"]
    assert service["ExecStart"].endswith("--foreground")
    assert int(service["TimeoutStopSec"]) >= load_script().TERM_S + load_script().KILL_S
    for word in ("# Purpose:", "# Size:", "# Command:"):
        assert word in text


def test_the_redis_of_the_compose_file_loses_nothing_and_shows_no_password() -> None:
    text = (LOCAL / "compose.yaml").read_text()
    service = yaml.safe_load(text)["services"]["redis"]
    command = service["command"][-1]
    for setting in ("--appendonly yes", "--appendfsync always", "noeviction"):
        assert setting in command
    assert "$$AENV_REDIS_PASSWORD" in command, "the container's variable, not compose's"
    assert service["ports"][0].startswith("${AENV_REDIS_BIND:-127.0.0.1}:")
