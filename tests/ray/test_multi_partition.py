"""A machine that nobody reaches any more: told as lost, its instances end, and it may come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import require
from tests.ray.faults import PROBE, eventually, eventually_empty
from tests.ray.machines import Machines
from tests.ray.nodes import Console, raised

TTL_S: Final = 25.0
LONG_S: Final = 120.0
"""For whatever Ray does about it on a busy machine."""
NOWHERE: Final = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there is lost without a word."""
CALLER = """
import asyncio, threading
from aenv_ray.actors.hub_actor import ensure_hub
from aenv_ray.actors.remote_hub import blocking
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.hub.records import Quota
hub = ensure_hub()
blocking(hub.set_quota(Quota(subject="owner:ann", max_instances=5)))
def used():
    blocking(hub.compare())
    return blocking(hub.quotas())["owner:ann"][0]
def call(handle, tool, **arguments):
    return asyncio.run(RayInstance(handle).call_tool(tool, arguments, 600.0)).data
ended = []
def call_and_tell():
    try:
        asyncio.run(RayInstance(far[0]).call_tools(
            [("note", {"line": "begun"}), ("hold", {"key": "never"})], False, 600.0))
        ended.append("a result")
    except Exception as exc:
        ended.append(type(exc).__name__)
"""
pytestmark = pytest.mark.timeout(900)  # several Rays start one after another


class Cable:
    """A network namespace and the cable that leads to it; both end with this process.

    The namespace belongs to a process that reads our end of a pipe, so nothing is left of it
    however the tests end.
    """

    def __init__(self) -> None:
        # A network of four addresses that is this process's own.
        network = os.getpid() % 2**14 * 4
        self.here, self.there = (
            f"10.201.{(network + n) >> 8}.{(network + n) & 255}" for n in (1, 2)
        )
        self._device = f"cable{os.getpid()}"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.inside = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")

    def refusal(self) -> str:
        """Lay it; return why this machine does not let us, empty when it does."""
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        if not self.holder.stdout.readline():
            return self.holder.stderr.read().strip()
        far = "far"  # a name in the other namespace, where it is alone
        for command in (
            f"ip link add {self._device} type veth peer name {far} netns {self.holder.pid}",
            f"ip address add {self.here}/30 dev {self._device}",
            f"ip link set {self._device} up",
        ):
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                return done.stderr.strip()
        self._run_there(f"ip address add {self.there}/30 dev {far}")
        self._run_there(f"ip link set {far} up")
        self._run_there("ip link set lo up")
        return ""

    def _run_there(self, command: str) -> None:
        subprocess.run([*self.inside, *command.split()], check=True)

    def cut(self) -> None:
        """Lose everything that is sent from now on, both ways."""
        command = f"ip neighbour replace {{}} lladdr {NOWHERE} dev {{}} nud permanent"
        subprocess.run(command.format(self.there, self._device).split(), check=True)
        self._run_there(command.format(self.here, "far"))

    def mend(self) -> None:
        """Let everything through again."""
        subprocess.run(["ip", "neighbour", "delete", self.there, "dev", self._device], check=True)
        self._run_there(f"ip neighbour delete {self.here} dev far")

    def close(self) -> None:
        """End the namespace, and the cable with it."""
        subprocess.run(["ip", "link", "delete", self._device], capture_output=True, check=False)
        self.holder.communicate(timeout=60)


@pytest.fixture
def cable() -> Iterator[Cable]:
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    require("netns", not missing, f"not installed: {', '.join(missing)}")
    cable = Cable()
    try:
        refusal = cable.refusal()
        require("netns", not refusal, refusal)
        yield cable
    finally:
        cable.close()


@pytest.fixture
def machines(cable: Cable) -> Iterator[Machines]:
    """A head that leads, and two workers with places; the second at the cable's other end."""
    root = Path(tempfile.mkdtemp(prefix="aenv-p", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        machines = Machines(root, ip=cable.here)
        stack.callback(machines.close)
        machines.head()
        machines.worker("near", 2)
        machines.worker("far", 3, ip=cable.there, inside=cable.inside)
        yield machines


def sandboxes_there(machines: Machines, cable: Cable) -> dict[int, Path]:
    """Return the sandboxes at the cable's other end, by pid, with their working directories."""
    namespace = os.readlink(f"/proc/{cable.holder.pid}/ns/net")
    found = {}
    for pid in machines.sandboxes():
        with contextlib.suppress(OSError):  # it has just ended
            if os.readlink(f"/proc/{pid}/ns/net") == namespace:
                found[pid] = Path(f"/proc/{pid}/cwd")
    return found


def test_a_machine_is_cut_off_and_comes_back(cable: Cable, machines: Machines) -> None:
    """Invariants 1 to 3, when neither head nor controller can tell that machine anything."""
    console = Console({**machines.variables, "RAY_ADDRESS": machines.address})
    with contextlib.closing(console):
        console.do(f"PROBE = {str(PROBE)!r}\n{CALLER}")
        console.do("made = aenv_ray.create_many(PROBE, 4, owner='ann', ttl=3600.0)")
        # The far machine alone has room for one more.
        console.do(f"short = aenv_ray.create(PROBE, owner='ann', ttl={TTL_S})")
        console.do(
            "node = {h.instance_id: ray.get(h.info.remote()).node_id for h in [short, *made]}"
        )
        console.do("far = [h for h in made if node[h.instance_id] == node[short.instance_id]]")
        console.do("near = [h for h in made if h not in far]")
        console.do("threading.Thread(target=call_and_tell, daemon=True).start()")
        started = eventually(lambda: notes_of(sandboxes_there(machines, cable)), LONG_S)
        with started.open() as notes:
            cable.cut()
            assert console.value("call(near[0], 'count')") == 1
            lost = raised(lambda: console.value("call(far[1], 'count')"))
            assert "SandboxLost" in lost
            eventually(lambda: console.value("ended") == ["SandboxLost"], LONG_S)
            assert console.value("call(near[0], 'count')") == 2
            listed = console.value("[i.id for i in aenv_ray.list_instances()]")
            assert sorted(listed) == sorted(console.value("[h.instance_id for h in near]"))
            eventually(lambda: console.value("used()") == 2, LONG_S)
            full = raised(lambda: console.do("aenv_ray.create(PROBE, queue_timeout=0.0)"))
            assert "CapacityExceeded" in full
            console.do("ray.get(near.pop().release.remote(), timeout=60)")
            console.do("near.append(aenv_ray.create(PROBE, owner='ann'))")
            assert console.value("call(near[1], 'count')") == 1
            eventually(lambda: len(sandboxes_there(machines, cable)) < 3, TTL_S + LONG_S)
            cable.mend()
            eventually_empty(lambda: sandboxes_there(machines, cable), LONG_S)
            assert notes.read() == "begun\n", "invariant 1"
        machines.worker("far", 3, ip=cable.there, inside=cable.inside)
        console.do("again = aenv_ray.create_many(PROBE, 3, owner='ann')")
        assert console.value("[call(h, 'count') for h in again]") == [1, 1, 1]
        assert len(sandboxes_there(machines, cable)) == 3


def notes_of(sandboxes: dict[int, Path]) -> Path | None:
    """Return the notes that one of these sandboxes has written."""
    written = (place / "notes.txt" for place in sandboxes.values())
    return next((path for path in written if path.exists()), None)
