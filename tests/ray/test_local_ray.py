"""A local Ray that a program gets without asking: how long it lives, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.quickstarts import Running, root
from tests.ray.faults import PROBE, Driver, eventually_empty, processes_of, stop

__all__ = ["root"]  # a fixture

pytestmark = pytest.mark.timeout(300)  # `ray stop` gives Ray's processes 16 s to end

CREATES = (
    f"path = {str(PROBE)!r}\n"
    "made = [aenv_ray.create(path, actor=a) for a in ('shared', 'dedicated')]\n"
    "made += [aenv_ray.create(path, actor='shared', lifetime='detached')]\n"
    "ray.get([h.exec.remote('setsid sleep 1234 >/dev/null 2>&1 &') for h in made])\n"
    "ray.get(made[0].call_tool.remote('count'))\n"
)
HELD = "held = made[1].call_tool.remote('hold', {'key': 'never'})\n"
IN_A_THREAD = f"""
import threading
thread = threading.Thread(target=exec, args=({CREATES!r}, globals()))
thread.start()
thread.join()
counts = [ray.get(made[0].call_tool.remote("count")).data for _ in range(2)]
processes = ray._private.worker._global_node.all_processes
say([counts, [kind[0].process.poll() for kind in processes.values()]])
"""


@pytest.mark.parametrize(
    "begun", ["raylet/raylet", "ray::DashboardAgent"], ids=["its raylet", "an agent"]
)
def test_ctrl_c_while_it_starts_leaves_nothing(root: Path, begun: str) -> None:
    """Invariant 3: its agents would look for the head of a Ray that is gone, for a minute."""
    running = Running(root)

    def is_begun() -> bool:
        return any(begun in command for command in session_of(running.session))

    running.interrupt(is_begun)
    eventually_empty(lambda: session_of(running.session), 50.0)


def session_of(session: int) -> list[str]:
    """Return the commands of a session's live processes; Ray's agents overwrite all else."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == session:
                command = Path("/proc", name, "cmdline").read_bytes()
                found += [command.replace(b"\0", b" ").decode(errors="replace")] if command else []
    return found


def ours(root: Path) -> list[str]:
    """Return the launchers, templates and sandboxes of a cluster, with what they started."""
    marks = ("aenv_ray.engines", "aenv_ray.runtime", "sleep")
    return [c for c in processes_of(root).values() if any(mark in c for mark in marks)]


def test_it_survives_the_thread_that_started_it_and_ends_with_the_program(
    alone: Callable[..., Driver], short_dir: Path
) -> None:
    """The kernel kills Ray's processes with the thread that made them; a sampling has its own.

    A program that just ends leaves nothing, though it released nothing.
    """
    program = alone(IN_A_THREAD)
    counts, ends = program.said()
    assert (counts, set(ends)) == ([2, 3], {None})
    program.finish()
    assert program.process.returncode == 0
    eventually_empty(lambda: processes_of(short_dir))


def test_the_local_ray_of_a_killed_driver_ends(
    alone: Callable[..., Driver], short_dir: Path
) -> None:
    """A driver that started Ray itself, and SIGKILL: no host, launcher or sandbox stays."""
    program = alone(CREATES + "say(1)")
    program.said()
    assert len(ours(short_dir)) > 5
    program.kill()
    eventually_empty(lambda: ours(short_dir))


@pytest.mark.namespaces
def test_ray_stop_in_the_middle_leaves_nothing(
    alone: Callable[..., Driver], short_dir: Path
) -> None:
    """In its own namespaces, because it ends every Ray that it sees; a call is running."""
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    apart = ["unshare", *rights, "--pid", "--mount-proc", "--fork", "--kill-child"]
    program = alone(CREATES + HELD + "say(1)", inside=apart)
    program.said()
    assert len(ours(short_dir)) > 5
    pid = program.process.pid
    (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    enter = ["nsenter", f"--target={first}", "--pid", "--mount", *(["--user"] if rights else [])]
    with subprocess.Popen(
        [*enter, sys.executable, "-m", "ray.scripts.scripts", "stop"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as stopping:  # fmt: skip
        eventually_empty(lambda: [c for c in processes_of(short_dir).values() if "gcs_server" in c])
        stop(int(first))  # Ray's drivers ask a GCS that is gone without pause (2.60)
        said, _ = stopping.communicate(timeout=200)
    assert stopping.returncode == 0, said
    eventually_empty(lambda: ours(short_dir))
    program.kill()
    eventually_empty(lambda: processes_of(short_dir))


SAMPLED: Final = f"""
import socket
import urllib.request

def export():
    with urllib.request.urlopen(f"http://127.0.0.1:{{port}}/metrics") as answer:
        return answer.read().decode()

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False, _metrics_export_port=port, _system_config={{
    "enable_metrics_collection": True, "metrics_report_interval_ms": 500}})
def act(env, task):
    env.call_tool("count")
    env.record_usage(prompt_tokens=100, completion_tokens=7)
    if task.id == "2":
        raise KeyError("lost")

aenv_ray.sample({str(PROBE)!r}, act, [{{"id": str(n)}} for n in range(3)]).run()
def figures():
    return [line for line in export().splitlines() if line.startswith("ray_aenv_")]

found = []
while not (any("call_seconds_count" in line and line.endswith(" 3.0") for line in found)
           and any(line.startswith("ray_aenv_creates_total") for line in found)):
    found = figures()
say(found)
"""


def test_a_sampling_is_in_rays_prometheus_exporter(alone: Callable[..., Driver]) -> None:
    program = alone(SAMPLED)
    values = {name: value for name, _, value in (line.rpartition(" ") for line in program.said())}

    def value(metric: str) -> float:
        return sum(float(v) for name, v in values.items() if name.startswith(f"ray_{metric}{{"))

    assert value("aenv_sampling_episodes_total") == 3
    assert value("aenv_sampling_calls_total") == 3
    assert value("aenv_sampling_create_seconds_count") == 3
    assert value("aenv_sampling_reward_count") == 2
    half = [n for n in values if "aenv_sampling_reward_bucket" in n and 'le="0.55"' in n]
    less = [n for n in values if "aenv_sampling_reward_bucket" in n and 'le="0.45"' in n]
    assert ([values[n] for n in half], [float(values[n]) for n in less]) == (["2.0"], [0.0])
    tokens = {name: value for name, value in values.items() if "aenv_sampling_tokens" in name}
    assert {("prompt" in name, float(value)) for name, value in tokens.items()} == {
        (True, 300.0), (False, 21.0),
    }  # fmt: skip
    (failed,) = (name for name in values if "aenv_sampling_failures" in name)
    assert all(part in failed for part in ('cause="KeyError"', 'status="policy_failed"'))
    now = [value(f"aenv_sampling_{what}") for what in ("left", "playing", "waiting")]
    assert now == [0, 0, 0]
    assert value("aenv_creates_total") >= 3
    assert any('outcome="ok"' in name for name in values if "aenv_creates" in name)
    assert any('status="completed"' in name for name in values)
    program.finish()
