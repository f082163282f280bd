"""A process of the node takes the place of a sandbox at its door."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from aenv_ray.engines.node.directory import short_name
from aenv_ray.errors import SandboxLost
from aenv_ray.testing.contract_bench import Bench, value_of
from tests.contract.engines import new_host
from tests.contract.process.node import Node


@pytest.mark.ordinary_user
@pytest.mark.parametrize("own_node", ["none"], indirect=True)
async def test_a_restarted_host_rejects_an_impostor(own_node: Node, tmp_path: Path) -> None:
    """Invariant 14: without namespaces, processes of the sandbox reach the directory of sockets."""
    host = new_host()
    engine = own_node.engine(host)
    sandbox = await Bench(engine, tmp_path).start()
    await engine.close()
    (door,) = own_node.root.rglob(f"s/{short_name(sandbox.instance_id)}")
    again = own_node.engine(host)
    try:
        door.rename(door.with_name("true"))
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(str(door))
            impostor.listen()
            with pytest.raises(SandboxLost):
                await again.attach(sandbox.instance_id)
        door.unlink()
        door.with_name("true").rename(door)
        attached = await again.attach(sandbox.instance_id)
        assert await value_of(attached, "echo", text="the runtime") == "the runtime"
    finally:
        with contextlib.suppress(SandboxLost):
            await again.stop([sandbox.instance_id])
        await again.close()
