"""An agent leaves a message for the agent that plays the next episode on its instance."""

from __future__ import annotations

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.testing.contract_bench import Bench, evaluate, execute, value_of
from aenv_ray.testing.contract_reset import reset
from tests.attacks import headless

LEAVE = {
    "time of the work directory": "touch -d @86400 .",
    "time of /tmp": "touch -d @86400 /tmp",
    "mode of the work directory": "chmod 751 .",
    "attribute": "python3 -c \"import os; os.setxattr('.', 'user.note', b'86400')\"",
    "closed directory": "mkdir -p a/b && touch -d @86400 a && chmod 0 a",
    "shared memory": "echo 86400 > /dev/shm/note",
    "name in /var/tmp": "mkdir -p /var/tmp/86400",
    "queue": "ipcmk -Q",
}
READ = (
    "stat -c '%X %Y %a' . /tmp; python3 -c \"import os; print(os.listxattr('.'))\";"
    " ls -A . /tmp /var/tmp /dev/shm; ipcs -q"
)


async def seen(sandbox: Sandbox) -> str:
    return (await execute(sandbox, READ)).text()


@pytest.mark.namespaces
@pytest.mark.parametrize("how", LEAVE)
async def test_the_next_episode_sees_nothing_of_the_last_one(walled: Bench, how: str) -> None:
    """Invariant 14: it is gone, or the instance is not used again."""
    sandbox = await walled.start()
    await reset(sandbox)
    before = await seen(sandbox)
    assert (await reset(sandbox)).clean
    await value_of(sandbox, "run", command=["sh", "-c", f"{LEAVE[how]}; true"])
    if (await reset(sandbox)).clean:
        assert await seen(sandbox) == before


async def test_a_process_without_a_main_thread_does_not_survive_into_the_next_episode(
    either_engine: Bench,
) -> None:
    """Invariant 14: the kernel reports its state as that of one that has ended."""
    sandbox = await either_engine.start()
    await reset(sandbox)
    await value_of(sandbox, "run", command=["sh", "-c", headless.START])
    assert not await evaluate(sandbox, headless.IS_OVER)
    assert (await reset(sandbox)).clean
    assert await evaluate(sandbox, headless.IS_OVER)


SLOW_DOWN = {
    "policy": "os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, thread, 19)",
    "CPUs": "os.sched_setaffinity(thread, {min(os.sched_getaffinity(thread))})",
    "disk": "ctypes.CDLL(None).syscall("
    "{'x86_64': 251, 'aarch64': 30}[os.uname().machine], 1, thread, 3 << 13)",
}


@pytest.mark.parametrize("how", SLOW_DOWN)
async def test_the_next_episode_is_not_slowed_down(either_engine: Bench, how: str) -> None:
    """Invariant 14: an agent can make process 1 wait for all others, and only root can undo it."""
    sandbox = await either_engine.start()
    assert (await reset(sandbox)).clean
    script = (
        "import ctypes, os\n"
        "for thread in map(int, os.listdir('/proc/1/task')):\n"
        f"    try: {SLOW_DOWN[how]}\n"
        "    except ProcessLookupError: pass\n"
    )
    assert await value_of(sandbox, "run", command=["python3", "-c", script]) == 0
    found = await reset(sandbox)
    assert found.reasons == ("scheduling of process 1 has changed",)
