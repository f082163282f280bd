"""Which thread started which process, on kernels that do not tell."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aenv_ray.runtime.door import calls
from aenv_ray.runtime.door.calls import CallInterrupted, RunningCall
from aenv_ray.runtime.system import child_tracking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SLEEP = ["sleep", "600"]


@pytest.fixture
def no_child_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a kernel that does not list the children of threads."""
    for module, name in (
        ("_posixsubprocess", "fork_exec"), ("subprocess", "_fork_exec"), ("os", "fork"),
        ("os", "forkpty"), ("os", "posix_spawn"), ("os", "posix_spawnp"),
    ):  # fmt: skip
        owner = sys.modules[module]
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(child_tracking, "_tracker", child_tracking.ChildTracker())
    monkeypatch.setattr(calls, "LISTS_CHILDREN", False)
    child_tracking.track_children()


@pytest.fixture
def older_child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def mine() -> list[int]:
    return child_tracking.children_of_thread(threading.get_native_id())


def in_thread(function: Any) -> Any:
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.append(function()))
    thread.start()
    thread.join(60.0)
    return kept[0]


@pytest.mark.usefixtures("no_child_lists")
def test_every_way_to_start_a_process_is_recorded() -> None:
    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            os.execvp(SLEEP[0], SLEEP)
        return pid

    def fork_terminal() -> int:
        pid, fd = os.forkpty()
        if pid == 0:
            os.execvp(SLEEP[0], SLEEP)
        os.close(fd)
        return pid

    with subprocess.Popen(SLEEP) as process:
        pids = [
            process.pid, fork(), fork_terminal(), os.posix_spawnp("sleep", SLEEP, dict(os.environ))
        ]  # fmt: skip
        assert mine() == pids
        assert in_thread(mine) == []
        for pid in pids:
            os.kill(pid, 9)
        assert mine() == pids, "not reaped"
        for pid in pids[1:]:
            os.waitpid(pid, 0)
    assert mine() == []


@pytest.mark.usefixtures("no_child_lists")
def test_a_failed_start_is_not_recorded_and_raises_as_before() -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(["/no/such/program"], check=False)
    with pytest.raises(FileNotFoundError):
        os.posix_spawn("/no/such/program", ["program"], {})
    assert mine() == []


@pytest.mark.usefixtures("no_child_lists")
def test_records_of_finished_processes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_tracking, "_PRUNE_AT", 4)
    tracker = child_tracking.ChildTracker()
    start = tracker.track(lambda: alive.pid)
    with subprocess.Popen(SLEEP) as alive:
        gone = tracker.track(lambda: 2**22 + 1)
        start()
        for _ in range(20):
            gone()
        assert tracker.children_of_thread(threading.get_native_id()) == [alive.pid]
        assert len(tracker._records) <= 4
        alive.kill()


@pytest.mark.usefixtures("no_child_lists")
def test_stopping_a_call_kills_only_the_children_of_that_call(
    older_child: subprocess.Popen[bytes],
) -> None:
    """Invariant 3: not what was there before, nor what another call started meanwhile."""
    one = RunningCall("id", "tool", time.monotonic() + 60.0)
    ended: list[Any] = []

    def run() -> None:
        earlier = subprocess.Popen(SLEEP)
        try:
            one.run_sync(subprocess.run, {"args": SLEEP, "check": False})
        except CallInterrupted as exc:
            ended.append(exc)
        ended.append(earlier.poll())
        earlier.kill()
        earlier.wait()

    thread = threading.Thread(target=run)
    thread.start()
    end = time.monotonic() + 60.0
    while len(child_tracking.children_of_thread(thread.native_id or 0)) < 2:
        assert time.monotonic() < end
    with subprocess.Popen(SLEEP) as another:
        one.stop("timeout")
        thread.join(60.0)
        assert isinstance(ended[0], CallInterrupted)
        assert ended[1] is None, "the thread's earlier child lives"
        assert another.poll() is None
        another.kill()
    assert older_child.poll() is None
