"""Timeouts, cancellation and concurrent callers."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mini_terminal
import pytest
from conftest import Execute
from fifo_lock import FifoLock
from shell import Shell

STOPPED = [
    "sleep 100",
    "sleep 100; echo after",
    "while :; do :; done; echo after",
    "x=$(sleep 100); echo after",
    "sleep 100 | cat; echo after",
    "f() { sleep 100; }; f; echo after",
    "cat /dev/tty",
    "read line </dev/tty",
    "sleep 100 & wait",
    "set +m; sleep 100",
    "PROMPT_COMMAND=; set -u; sleep 100",
]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("command", STOPPED)
def test_timeout_stops_the_command_and_keeps_the_shell(execute: Execute, command: str) -> None:
    execute("state=kept; echo $BASHPID")
    result = execute(f"echo before; {command}", 0.1)
    assert result["output"] == ["before\n", False]
    assert result["returncode"] == 124
    assert "stopped after 0.1 s" in result["note"]
    assert execute("echo $state") == {"output": ["kept\n", True], "returncode": 0}


@pytest.mark.parametrize(
    "command",
    [
        "bash -c \"trap '' INT; echo \\$\\$ > pid; while :; do sleep 100; done\"",
        "bash -c \"trap '' INT TERM; echo \\$\\$ > pid; while :; do sleep 100; done\"",
        "bash -c 'echo $$ > pid; kill -STOP $PPID; sleep 100'",
    ],
)
def test_command_that_ignores_the_interrupt_is_killed(execute: Execute, command: str) -> None:
    execute("state=kept; mkfifo gate")
    result = execute(command, 0.3)
    assert result["output"][1] is False
    assert execute("echo $state") == {"output": ["kept\n", True], "returncode": 0}
    assert execute("kill -0 $(cat pid) 2>/dev/null")["returncode"] == 1


def test_command_may_clean_up_when_interrupted(execute: Execute) -> None:
    program = "trap 'echo cleaned; exit 1' INT; echo ready; while :; do sleep 100; done"
    result = execute(f'bash -c "{program}"', 0.2)
    assert result["output"] == ["ready\ncleaned\n", False]


def test_shell_that_cannot_be_interrupted_is_replaced(execute: Execute) -> None:
    result = execute("trap '' INT; while :; do :; done", 0.1)
    assert result["output"] == ["", False]
    assert "this ended the shell" in result["note"]
    assert execute("echo fresh") == {
        "output": ["fresh\n", True],
        "returncode": 0,
        "restarted": True,
    }


def test_background_jobs_survive_a_timeout(execute: Execute) -> None:
    pid = int(execute("sleep 100 & echo $!")["output"][0])
    assert execute("sleep 100", 0.1)["output"][1] is False
    assert is_alive(pid)


def test_flood_is_stopped(execute: Execute) -> None:
    result = execute("yes", 0.2)
    assert result["output"][1] is False
    assert execute("echo next")["output"] == ["next\n", True]


def test_calls_run_in_the_order_of_their_arrival(execute: Execute) -> None:
    execute("mkfifo gate; n=0")
    shell = mini_terminal._shell
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(execute, "read x < gate; echo first >> order", 20)
        waiting = []
        for number in range(10):
            length = len(shell._lock._queue)
            waiting.append(pool.submit(execute, f"n=$((n + 1)); echo {number} $n", 20))
            while len(shell._lock._queue) == length:
                pass
        with open("gate", "w") as gate:
            gate.write("go\n")
        assert first.result()["output"][1]
        outputs = [future.result()["output"][0] for future in waiting]
    assert outputs == [f"{number} {number + 1}\n" for number in range(10)]


def test_the_timeout_includes_the_wait_for_earlier_calls(execute: Execute) -> None:
    execute("mkfifo gate")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(execute, "echo > started; read x < gate", 20)
        while not os.path.exists("started"):
            pass
        result = execute("echo > never", 0.05)
        assert result["output"] == ["", False]
        assert result["returncode"] == 124
        assert "not started" in result["note"]
        with open("gate", "w") as gate:
            gate.write("go\n")
        assert first.result()["output"] == ["", True]
    assert not os.path.exists("never")


class Cancelled(BaseException):
    """Stands for the exception with which the runtime interrupts a call."""


def test_cancelled_call_stops_its_command_and_frees_the_shell(execute: Execute) -> None:
    execute("state=kept")
    ended: list[BaseException] = []

    def call() -> None:
        try:
            execute("echo $BASHPID > shell; sh -c 'echo $$ > pid; exec sleep 100'", 60)
        except Cancelled as exc:
            ended.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    while not (os.path.exists("pid") and os.path.getsize("pid")):
        pass
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Cancelled)
    )
    started = time.monotonic()
    thread.join(10)
    assert time.monotonic() - started < 2
    assert [type(exc) for exc in ended] == [Cancelled]
    assert execute("kill -0 $(cat pid) 2>/dev/null; echo $? $state")["output"][0] == "1 kept\n"


def test_a_ticket_that_is_garbage_collected_does_not_block_the_lock() -> None:
    lock = FifoLock()
    lock.acquire(time.monotonic() + 1)
    ticket = lock.acquire(time.monotonic() + 5)
    assert ticket is not None
    assert lock.acquire(time.monotonic() + 0.01) is None
    lock.release(ticket)
    assert lock.acquire(time.monotonic()) is not None


def test_close_kills_the_shell_and_its_jobs_and_leaks_nothing(workdir: object) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    shell = Shell()
    pids = shell.run("nohup sleep 100 >/dev/null 2>&1 & echo $! $$", 10)["output"][0].split()
    shell.run("exit", 10)
    again = shell.run("setsid -f true; sleep 100 & echo $! $$", 10)["output"][0].split()
    job = os.pidfd_open(int(again[0]))
    shell.close()
    shell.close()
    assert not is_alive(int(again[1]))
    poll = select.poll()
    poll.register(job, select.POLLIN)
    assert poll.poll(5000), "the job has outlived its shell"
    os.close(job)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not is_alive(int(pids[1]))
    # Processes that were started before an `exit` continue, as after a logout.
    os.kill(int(pids[0]), signal.SIGKILL)


def test_close_ends_a_running_command(execute: Execute) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(execute, "echo > started; sleep 100", 60)
        while not os.path.exists("started"):
            pass
        mini_terminal._shell.close()
        assert running.result(10)["returncode"] == 137
