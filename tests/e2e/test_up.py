"""`aenv up` brings up a fabric that outlives it, and `aenv down` leaves nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.another_user import open_to_others
from tests.contract.processes import signal_all
from tests.ray.cluster import FRUGAL
from tests.ray.faults import eventually, eventually_empty, processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(600)]

AENV = [sys.executable, "-m", "aenv_ray.cli.main"]
UP = ("up", "--port", "0", "--mcp-port", "0", "--num-cpus", "4", "-o", "json")


class Machine:
    """Its own directories for everything, so that it has its own fabric."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="aenv-u", dir="/tmp"))
        self.root.chmod(0o755)
        places = {"HOME": "h", "AENV_DATA_DIR": "d", "AENV_RUNTIME_DIR": "r", "RAY_TMPDIR": "t"}
        left_out = {"RAY_ADDRESS", "AENV_SYSTEM_URL", "AENV_API_KEY"}
        self.environment = {k: v for k, v in os.environ.items() if k not in left_out} | FRUGAL
        for name, place in places.items():
            (self.root / place).mkdir()
            self.environment[name] = str(self.root / place)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*AENV, *words], env=self.environment, cwd=self.root / "h", text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0) -> Any:
        process = self.start(*words)
        out, err = process.communicate(timeout=500)
        assert process.returncode == code, err
        return json.loads(out) if "json" in words else out

    def end(self) -> None:
        """Take it down, whatever the test left, and prove that nothing is left."""
        try:
            self.run("down")
            eventually_empty(lambda: processes_of(self.root), 30.0)
            assert list((self.root / "t").iterdir()) == []
            assert not (self.root / "d" / "up.json").exists()
        finally:
            signal_all(processes_of(self.root))
            shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture(scope="module")
def up() -> Iterator[tuple[Machine, dict[str, str]]]:
    machine = Machine()
    try:
        yield machine, machine.run(*UP)
    finally:
        machine.end()


@pytest.fixture
def aenv(up: tuple[Machine, dict[str, str]]) -> Callable[..., Any]:
    return up[0].run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_of_the_machine_cannot_reach_it(up):
    """Invariant 15: Ray's own directory, which Ray opens to all, is inside a private one."""
    root = up[0].root
    made = [path for place in ("h", "d", "r", "t") for path in (root / place).iterdir()]
    assert len(made) >= 4
    assert [path for directory in made for path in open_to_others(directory)] == []


def test_a_second_up_reports_that_it_is_already_up(up):
    machine, told = up
    assert set(told) == {"url", "mcp_url", "token", "ray_address"}
    again = machine.start(*UP)
    out, err = again.communicate(timeout=60)
    assert (again.returncode, json.loads(out)) == (0, told)
    assert "already up" in err
    found = machine.run("status", "-o", "json")
    assert (found["state"], found["gateway"], found["url"]) == ("up", "ok", told["url"])
    assert told["token"] not in json.dumps(found)


def test_the_doctor_reports_the_security_of_what_is_up(aenv, up):
    """It fails once the operator's settings leave open what a gateway needs closed."""
    machine, _ = up
    found = {row["name"]: row for row in aenv("doctor", "--security", "-o", "json")}
    assert found["files"]["verdict"] == found["gateway's address"]["verdict"] == "ok"
    assert "1 admin" in found["tokens"]["found"]
    assert "with a token" in found["Ray's addresses"]["found"]
    assert "kernel" in found["not defended: process"]["found"]
    machine.environment |= {"AENV_POLICY": "open", "AENV_ISOLATION": "none"}
    try:
        rows = aenv("doctor", "--security", "-o", "json", code=1)
    finally:
        del machine.environment["AENV_POLICY"], machine.environment["AENV_ISOLATION"]
    failed = [row["name"] for row in rows if row["verdict"] == "failed"]
    assert failed == ["process sandboxes", "policy"]


def test_a_project_is_pushed_created_called_and_ended(aenv, up):
    machine, _ = up
    aenv("init", "todo")
    pushed = aenv("push", "todo", "-o", "json")
    assert "guess" in {one["name"] for one in pushed["functions"]}
    made = aenv("instance", "create", "todo@1.0.0", "--keep-alive", "-o", "json")
    info = aenv("instance", "info", made["id"], "-o", "json")
    assert [tool["name"] for tool in info["tools"]] == ["guess"]
    assert info["health"]["status"] in {"healthy", "success"}
    process = machine.start("instance", "exec", made["id"], "echo out; echo err >&2; exit 7")
    assert process.communicate(timeout=60) == ("out\n", "err\n")
    assert process.returncode == 7
    aenv("instance", "delete", made["id"], "--yes")
    assert aenv("instance", "list", "-o", "json") == []


def test_a_held_instance_ends_with_its_terminal(aenv, up):
    machine, _ = up
    held = machine.start("instance", "create", "mini-terminal", "--ttl", "5m")
    assert held.stdout is not None
    name = held.stdout.readline().strip()
    assert [one["id"] for one in aenv("instance", "list", "-o", "json")] == [name]
    os.killpg(held.pid, signal.SIGHUP)
    held.communicate(timeout=60)
    assert held.returncode == 0
    assert aenv("instance", "list", "-o", "json") == []


def test_ray_code_and_samples_join_the_fabric_that_is_up(aenv, up):
    machine, _ = up
    (machine.root / "h" / "pol.py").write_text(
        "async def act(env, task):\n"
        "    for step in task.reference:\n"
        "        await env.call_tool(step.tool, step.arguments)\n"
    )
    words = ("sample", "mini-terminal", "--policy", "pol:act", "-n", "4", "-c", "2-4")
    found = aenv(*words, "-o", "json")
    assert (found["succeeded"], found["infra_failed"]) == (4, 0)
    assert len((machine.root / "h" / "episodes.jsonl").read_text().splitlines()) == 4
    aenv(*words, code=3)  # the file has episodes
    aenv(*words, "--force", "-o", "json")


def test_a_rescored_run_is_the_run_with_other_rewards(aenv, up):
    machine, _ = up
    home = machine.root / "h"
    aenv(
        "sample", "mini-terminal", "--policy", "reference", "--limit", "3", "--out", "run1.jsonl",
        "-o", "json",
    )  # fmt: skip
    said = {"role": "user", "content": "solve it"}
    records = sorted(
        map(json.loads, (home / "run1.jsonl").read_text().splitlines()), key=lambda r: r["index"]
    )
    records = [record | {"reward": 0.0, "messages": [said]} for record in records]
    records[0] |= {"status": "timed_out"}  # which is not replayed
    (home / "run1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    found = aenv("rescore", "run1.jsonl", "--out", "rescored.jsonl", "-o", "json")
    assert [(one["index"], one["after"]) for one in found["episodes"]] == [(1, 1.0), (2, 1.0)]
    rescored = sorted(
        map(json.loads, (home / "rescored.jsonl").read_text().splitlines()),
        key=lambda r: r["index"],
    )
    assert found["not_replayed"] == {"timed_out": 1}
    assert rescored[0] == records[0], "it is in the output as recorded"
    for before, after in zip(records[1:], rescored[1:], strict=True):
        assert after == before | {"reward": 1.0, "reward_detail": after["reward_detail"]}


def test_a_suite_is_evaluated_on_the_fabric_that_is_up(aenv, up):
    machine, _ = up
    words = ("eval", "mini-terminal,code", "-p", "reference", "--limit", "2", "--out", "results")
    terminal, code = aenv(*words, "--samples-per-task", "2", "-o", "json")
    for found in (terminal, code):
        assert (found["tasks"], found["episodes"], found["reward_mean"]) == (2, 4, 1.0)
        assert (found["void"], found["is_complete"]) == (0, True)
        assert found["confidence_interval"][0] > 0.2
        assert [one["estimate"] for one in found["pass_at_k"]] == [1.0, 1.0]
    files = {one.name for one in (machine.root / "h" / "results").iterdir()}
    assert files == {"mini-terminal.jsonl", "code.jsonl", "results.json"}
    aenv(*words, code=3)  # the directory has results


def test_a_sample_that_is_interrupted_says_how_to_go_on(aenv, up):
    machine, _ = up
    home = machine.root / "h"
    (home / "stop.py").write_text(
        "import asyncio, pathlib\n"
        "async def act(env, task):\n"
        "    for step in task.reference:\n"
        "        await env.call_tool(step.tool, step.arguments)\n"
        "    if pathlib.Path('cut.jsonl').stat().st_size and not pathlib.Path('go').exists():\n"
        "        pathlib.Path('stands').touch()\n"
        "        await asyncio.sleep(3600)\n"
    )
    words = (
        "sample",
        "mini-terminal",
        "-p",
        "stop:act",
        "-n",
        "3",
        "-c",
        "1",
        "--out",
        "cut.jsonl",
    )
    process = machine.start(*words)
    eventually((home / "stands").exists)
    process.send_signal(signal.SIGINT)
    while (
        "Ctrl-C again stops them" not in process.stderr.readline()
    ):  # what runs would finish first
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (130, "")
    assert "finished episodes are in cut.jsonl; continue with --resume" in err
    assert "Traceback" not in err
    assert len((home / "cut.jsonl").read_text().splitlines()) == 1
    (home / "go").touch()
    assert aenv(*words, "--resume", "-o", "json")["succeeded"] == 3
    assert aenv("instance", "list", "-o", "json") == []


def test_down_removes_everything_of_an_up_that_was_killed():
    machine = Machine()
    try:
        process = machine.start(*UP)
        assert process.stderr is not None
        for line in process.stderr:
            if "starting the hub" in line:
                break
        else:
            pytest.fail("it never came to the hub")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert machine.run("status", "-o", "json", code=1)["state"] == "starting"
        raylets = [p for p, command in processes_of(machine.root).items() if "raylet" in command]
        assert raylets
        signal_all(raylets)
    finally:
        machine.end()


def ray_start(machine: Machine) -> str:
    """Run ``ray start --head``; return the address."""
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=4",
        f"--temp-dir={machine.root}/t/ray", "--include-dashboard=false", "--disable-usage-stats",
    ]  # fmt: skip
    subprocess.run(
        command, env=machine.environment, check=True, timeout=200, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return (machine.root / "t" / "ray" / "ray_current_cluster").read_text().strip()


def test_a_program_joins_the_ray_of_ray_start_while_that_runs():
    program = (
        "import aenv_ray, ray; fabric = aenv_ray.init()\n"
        "print(ray.get_runtime_context().gcs_address, fabric.owns_ray); aenv_ray.shutdown()"
    )
    machine = Machine()

    def joined() -> list[str]:
        return subprocess.check_output(
            [sys.executable, "-c", program], env=machine.environment, text=True, timeout=200
        ).split()

    try:
        address = ray_start(machine)
        assert joined() == [address, "False"]
        signal_all(processes_of(machine.root))
        eventually_empty(lambda: processes_of(machine.root), 60.0)
        assert joined()[1] == "True", "its address is still in a file"
    finally:
        signal_all(processes_of(machine.root))
        shutil.rmtree(machine.root, ignore_errors=True)


def test_a_ray_that_was_already_running_is_used_and_not_stopped():
    machine = Machine()
    machine.environment["RAY_AUTH_MODE"] = "disabled"
    try:
        address = ray_start(machine)
        machine.environment["RAY_ADDRESS"] = address
        assert machine.run(*UP)["ray_address"] == address
        made = machine.run("instance", "create", "mini-terminal", "--keep-alive", "-o", "json")
        found = machine.run("status", "-o", "json")
        assert (found["instances"], found["ray_is_its_own"]) == (1, False)
        machine.run("down")
        left = machine.run("instance", "logs", made["id"], code=1)
        assert left == "", "Ray answers, and the instance has ended with the gateway"
        held = " ".join(processes_of(machine.root).values())
        assert "gcs_server" in held
        assert "HubActor" not in held
        assert "redis" not in held
    finally:
        signal_all(processes_of(machine.root))
        eventually_empty(lambda: processes_of(machine.root), 60.0)
        shutil.rmtree(machine.root, ignore_errors=True)
