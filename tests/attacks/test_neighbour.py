"""A sandbox attacks another sandbox on its node."""

from __future__ import annotations

import pytest

from aenv_ray.testing.contract_bench import Bench, evaluate, execute, value_of


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
