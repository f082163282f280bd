"""An agent, which may only call tools, tries to get, forge or void its reward."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.errors import InsideCause, SandboxDiedInside
from aenv_ray.testing.contract_bench import Bench, call, request, value_of

REWARD = {"name": "score", "arguments": {"answer": "42"}}


@pytest.mark.ordinary_user
async def test_a_call_id_of_the_trainer_gives_an_agent_nothing(either_engine: Bench) -> None:
    """Invariant 14: neither the outcome of a reward, nor its place."""
    sandbox = await either_engine.start()
    assert await request(sandbox, "aenv/reward", REWARD, call_id="graded") == {"score": 1.0}
    stolen = await call(sandbox, "echo", {"text": "mine"}, call_id="graded")
    assert stolen.data == "mine"
    assert (await call(sandbox, "echo", {"text": "forged"}, call_id="next")).data == "forged"
    assert await request(sandbox, "aenv/reward", REWARD, call_id="next") == {"score": 1.0}


async def test_an_agent_cannot_cancel_a_call_of_the_trainer(either_engine: Bench) -> None:
    """Invariant 14: a cancelled tool call with the same id stops the tool call alone."""
    sandbox = await either_engine.start()
    graded = asyncio.create_task(
        request(sandbox, "aenv/function", {"name": "reset", "arguments": {"seed": 7}}, call_id="x")
    )
    napping = asyncio.create_task(call(sandbox, "nap", {"seconds": 60.0}, call_id="x"))
    await value_of(sandbox, "echo", text="both were sent before this")
    napping.cancel()
    assert await graded == {"seed": 7}


async def test_an_exit_is_an_outcome(either_engine: Bench) -> None:
    """Invariant 14: an agent whose code runs in the runtime can exit, which does not void."""
    sandbox = await either_engine.start()
    with pytest.raises(SandboxDiedInside) as raised:
        await call(sandbox, "leave", {"code": 1})
    assert raised.value.died_of is InsideCause.EXIT


@pytest.mark.namespaces
async def test_a_closed_connection_is_an_outcome(walled: Bench) -> None:
    """Invariant 14: code in the runtime that closes the door while its process runs on."""
    sandbox = await walled.start()
    source = (
        "import os, socket\n"
        "for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "    try:\n"
        "        sock = socket.socket(fileno=os.dup(fd))\n"
        "        sock.getpeername()  # raises for the listening socket\n"
        "        sock.shutdown(socket.SHUT_RDWR)\n"
        "    except OSError: pass\n"
    )
    with pytest.raises(SandboxDiedInside) as raised:
        await call(sandbox, "evaluate", {"source": source})
    assert raised.value.died_of is InsideCause.CONNECTION
