"""Which thread started which process, where the kernel does not tell."""

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
from aenv_ray.runtime.door.calls import Call, CallInterrupted
from aenv_ray.runtime.system import child_tracking as births

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SLEEP = ["sleep", "600"]


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a kernel that lists no thread's children."""
    for module, name in (
        ("_posixsubprocess", "fork_exec"), ("subprocess", "_fork_exec"), ("os", "fork"),
        ("os", "forkpty"), ("os", "posix_spawn"), ("os", "posix_spawnp"),
    ):  # fmt: skip
        owner = sys.modules[module]
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(births, "_births", births.Births())
    monkeypatch.setattr(calls, "LISTS_CHILDREN", False)
    births.note()


@pytest.fixture
def older() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def mine() -> list[int]:
    return births.of_thread(threading.get_native_id())


def in_thread(function: Any) -> Any:
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.append(function()))
    thread.start()
    thread.join(60.0)
    return kept[0]


@pytest.mark.usefixtures("untold")
def test_each_way_to_start_a_process_is_noted() -> None:
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


@pytest.mark.usefixtures("untold")
def test_a_start_that_fails_is_nobodys_child_and_raises_as_before() -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(["/no/such/program"], check=False)
    with pytest.raises(FileNotFoundError):
        os.posix_spawn("/no/such/program", ["program"], {})
    assert mine() == []


@pytest.mark.usefixtures("untold")
def test_notes_of_those_that_are_gone_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(births, "_KEPT", 4)
    made = births.Births()
    start = made.noting(lambda: kept.pid)
    with subprocess.Popen(SLEEP) as kept:
        gone = made.noting(lambda: 2**22 + 1)
        start()
        for _ in range(20):
            gone()
        assert made.of_thread(threading.get_native_id()) == [kept.pid]
        assert len(made._notes) <= 4
        kept.kill()


@pytest.mark.usefixtures("untold")
def test_stopping_a_call_kills_what_it_waits_for_and_nothing_else(
    older: subprocess.Popen[bytes],
) -> None:
    """Invariant 3: not what was there before, nor what another call started meanwhile."""
    one = Call("id", "tool", time.monotonic() + 60.0)
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
    while len(births.of_thread(thread.native_id or 0)) < 2:
        assert time.monotonic() < end
    with subprocess.Popen(SLEEP) as another:
        one.stop("timeout")
        thread.join(60.0)
        assert isinstance(ended[0], CallInterrupted)
        assert ended[1] is None, "the thread's earlier child lives"
        assert another.poll() is None
        another.kill()
    assert older.poll() is None
