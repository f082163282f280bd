"""A sandbox attacks another sandbox on its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_ray.testing.contract_bench import Bench, evaluate, execute, value_of
from tests.contract.process.node import Node


@pytest.mark.ordinary_user
async def test_a_neighbours_files_and_sockets_cannot_be_reached(either_engine: Bench) -> None:
    """Invariant 7: not its shared memory, temporary files, abstract sockets or ports."""
    victim, attacker = await either_engine.start(), await either_engine.start()
    port = await value_of(victim, "listen")
    await execute(victim, "echo secret | tee /dev/shm/note > /tmp/note")
    await evaluate(
        victim,
        "import builtins, socket\n"
        "builtins.listener = socket.socket(socket.AF_UNIX)\n"
        "builtins.listener.bind('\\0victim')\nbuiltins.listener.listen()\nresult = None\n",
    )
    connect = (
        "import socket\nresult = 'reached'\n"
        "try: socket.socket(socket.AF_UNIX).connect('\\0victim')\n"
        "except OSError as exc: result = type(exc).__name__\n"
    )
    assert await evaluate(victim, connect) == "reached"
    assert await evaluate(attacker, connect) == "ConnectionRefusedError"
    assert await value_of(attacker, "connect", port=port) is False
    for note in ("/dev/shm/note", "/tmp/note"):
        assert (await execute(victim, f"cat {note}")).exit_code == 0
        assert (await execute(attacker, f"cat {note}")).exit_code != 0


async def test_files_without_content_are_limited(either_engine: Bench) -> None:
    """Invariant 7: each costs the node a kibibyte that no limit of bytes counts."""
    small = either_engine.contract_project({"ephemeralStorage": "64M"})
    attacker, neighbour = await either_engine.start(small), await either_engine.start(small)
    created = await evaluate(
        attacker,
        "import os\nresult = 0\n"
        "try:\n"
        "    while result < 100_000:\n"
        "        os.close(os.open(f'{os.environ[\"HOME\"]}/{result}', os.O_CREAT))\n"
        "        result += 1\n"
        "except OSError as exc:\n    assert exc.errno == 28, exc\n",
    )
    assert 1000 < created <= 4096
    assert (await execute(neighbour, "touch note && rm note")).exit_code == 0


@pytest.mark.ordinary_user
@pytest.mark.namespaces
async def test_the_kernel_ends_sandboxes_before_the_launcher(
    walled: Bench, walled_node: Node
) -> None:
    """Invariant 7: a sandbox that uses up the node's memory costs neither its launcher nor Ray."""
    sandbox = await walled.start()
    await evaluate(
        sandbox,
        "import builtins, subprocess\nresult = None\n"
        "builtins.child = subprocess.Popen(['sleep', '100'])\n",
    )
    (launcher,) = walled_node.launcher_pids()
    pids = walled_node.sandbox_pids()
    assert len(pids) >= 2
    assert {_oom_score(pid) for pid in pids} == {1000}
    assert _oom_score(launcher) <= 0


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
