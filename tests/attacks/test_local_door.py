"""A sandbox, or another user, tries to reach a sandbox as a caller on its node does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv_ray.actors.calls.introduction import DoorClaim, Introduction
from aenv_ray.actors.calls.local_door import present
from aenv_ray.actors.host.host import Host
from aenv_ray.engines.base import EndCause
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.ids import InstanceId, new_instance_id
from aenv_ray.models import ActorDensity, InstanceSpec, Isolation
from aenv_ray.project import project
from aenv_ray.runtime.door.roles import DoorRole
from aenv_ray.testing.contract_bench import Bench, evaluate
from tests.another_user import open_to_others, refusal
from tests.contract.engines import new_host
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.contract.process.node import Node

_LOOK = """
import ctypes, hashlib, os, re, socket
wanted, path = set({wanted!r}), {path!r}
result = []

def holds(data):
    for run in re.finditer(rb"[0-9a-f]{{64,}}", data):
        for at in range(len(run[0]) - 63):
            if hashlib.sha256(run[0][at:at + 64]).hexdigest() in wanted:
                return True
    return False

for line in open("/proc/self/maps"):
    span, rights, _, _, _, *name = line.split(None, 5)
    first, last = (int(end, 16) for end in span.split("-"))
    if rights.startswith("rw") and (not name or not name[0].startswith(("[v", "/dev"))):
        if holds(ctypes.string_at(first, last - first)):
            result.append(f"memory {{span}}")
for top in ("/home", "/tmp", "/var", "/dev", "/run", "/project", "/etc"):
    for root, _, names in os.walk(top):
        for name in names:
            file = os.path.join(root, name)
            try:
                if os.path.isfile(file) and holds(open(file, "rb").read(1 << 20)):
                    result.append(file)
            except OSError:
                pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            if holds(open(f"/proc/{{pid}}/{{name}}", "rb").read()):
                result.append(f"{{pid}} {{name}}")
        except OSError:
            pass
try:
    socket.socket(socket.AF_UNIX).connect(path)
    result.append("the socket of its host")
except OSError:
    pass
known = b"0123456789abcdef" * 4
wanted.add(hashlib.sha256(known).hexdigest())
assert holds(b"f" + known)
"""


@pytest.fixture
async def host(walled_node: Node, tmp_path: Path) -> AsyncIterator[Host]:
    """Yield a host with the process engine that introduces callers."""
    host_id = new_host()
    made = Host(
        host_id, node_id="n", density=ActorDensity.SHARED,
        make_engine=lambda _: walled_node.engine(host_id), store=MemoryInstanceStore(),
        projects_dir=tmp_path / "projects", introductions_path=walled_node.root / "h" / "1",
    )  # fmt: skip
    await made.open()
    yield made
    await made.release([row.id for row in await made.instances()])
    await made.close()


async def _no_cause() -> EndCause:
    return EndCause("its connection broke")


async def _introduced(host: Host, walled: Bench) -> tuple[InstanceId, Introduction]:
    """Start an instance, and return how its owner connects to it."""
    source = project.resolve(walled.contract_project({"network": "none"}))
    await host.put_project(source.digest, source.archive())
    spec = InstanceSpec(
        instance_id=new_instance_id("probe"), reference=source.reference,
        digest=source.digest, ttl_s=600.0, engine="process", job_id="j1",
    )  # fmt: skip
    await host.start([spec])
    introduction = await host.introduce(spec.instance_id, DoorRole.OWNER)
    assert introduction is not None
    return spec.instance_id, introduction


@pytest.mark.namespaces
async def test_the_key_of_a_caller_is_nowhere_in_the_sandbox(
    host: Host, walled: Bench, tmp_path: Path
) -> None:
    """Invariant 8: an agent with the key could call its reward. The socket is out of reach, too."""
    instance_id, introduction = await _introduced(host, walled)
    unused = await host.introduce(instance_id, DoorRole.OWNER)
    assert unused is not None
    link, door = await present(introduction, DoorClaim(instance_id, introduction.key))
    sandbox = DoorSandbox(instance_id, Isolation.model_construct(), "template", _no_cause)
    sandbox.connect(door)
    wanted = [hashlib.sha256(one.key.encode()).hexdigest() for one in (introduction, unused)]
    look = _LOOK.format(wanted=wanted, path=introduction.path)
    with link:
        assert await evaluate(sandbox, look) == []
    await sandbox.close()


@pytest.mark.namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_reaches_no_door(host: Host, walled: Bench, walled_node: Node) -> None:
    """Invariant 15: also where the directories above are open to everybody."""
    _, introduction = await _introduced(host, walled)
    assert Path(introduction.path).is_socket()
    walled_node.root.chmod(0o755)
    assert refusal(lambda: os.listdir(walled_node.root)) == "", "it can come this far"
    assert open_to_others(Path(introduction.path).parent) == []
