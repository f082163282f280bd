"""A daemon that dies and comes back: what runs in between, what is lost, and that it is said.

The daemon is one of this test's own, so nothing else on the machine notices.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.docker import DockerEngine
from aenv_ray.errors import FabricUnavailable, SandboxLost
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, call, eventually, value_of
from tests.conftest import require
from tests.contract.docker_node import base_image, data_dir

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]

_UP_S = 60.0


class OwnDaemon:
    """A Docker daemon with directories of its own, without a bridge."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
        self.address = f"unix://{self.root}/d.sock"
        # As where systemd starts it: it outlives the daemon, and containers outlive both.
        with (self.root / "containerd.log").open("ab") as log:
            self.containerd = subprocess.Popen(
                [
                    "containerd", "--address", str(self.root / "c.sock"), "--config", os.devnull,
                    "--root", str(self.root / "croot"), "--state", str(self.root / "cstate"),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.root / "log").open("ab") as log:
            process = subprocess.Popen(
                [
                    # Apart, for a daemon without a bridge deletes the one that it finds.
                    "unshare", "--net", "--", "dockerd", "--host", self.address,
                    "--containerd", str(self.root / "c.sock"),
                    "--data-root", str(self.root / "data"),
                    "--exec-root", str(self.root / "exec"), "--pidfile", str(self.root / "pid"),
                    "--bridge=none", "--iptables=false", "--ip-masq=false",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + _UP_S
        while self.run("version", check=False).returncode:
            words = (self.root / "log").read_text()[-2000:]
            assert process.poll() is None, words
            assert time.monotonic() < end, words
        return process

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = ["docker", "--host", self.address, *arguments]
        return subprocess.run(command, capture_output=True, check=check, timeout=120)

    def load(self, image: str) -> None:
        command = f"docker save {image} | docker --host {self.address} load"
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, capture_output=True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def start_again(self) -> None:
        self.process = self._start()

    def end(self) -> None:
        names = self.run("ps", "--all", "--quiet", check=False).stdout.decode().split()
        for process in (self.process, self.containerd):
            process.terminate()
            process.wait(60)
        for janitor in _pids(f"docker_janitor {self.root}"):
            os.kill(janitor, signal.SIGKILL)
        for shim in _pids(f"-address {self.root}"):  # of containers that nobody ended
            os.kill(shim, signal.SIGTERM)
        end = time.monotonic() + 20.0
        while _pids(str(self.root)) and time.monotonic() < end:
            time.sleep(0.02)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for target in sorted((m.split()[1] for m in mounts), reverse=True):
            if target.startswith(str(self.root)):
                subprocess.run(["umount", "--lazy", target], check=False)
        shutil.rmtree(self.root, ignore_errors=True)
        assert _pids(str(self.root)) == []
        assert names == []


def _pids(mark: str) -> list[int]:
    done = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


@pytest.fixture
def daemon() -> Iterator[OwnDaemon]:
    require("docker", os.geteuid() == 0, "a daemon of the test's own needs root")
    require("docker", shutil.which("dockerd") is not None, "dockerd is not installed")
    daemon = OwnDaemon()
    daemon.load(base_image())
    yield daemon
    daemon.end()


async def test_a_daemon_that_dies_and_comes_back(daemon: OwnDaemon, tmp_path: Path) -> None:
    """Invariants 1 and 2: sandboxes go on without it, and what its return ends is lost."""
    engine = DockerEngine(
        HostId(f"host-{uuid.uuid4().hex[:8]}"), runtime_dir=daemon.root / "r", data_dir=data_dir(),
        scope=daemon.root.name, owner_pid=os.getpid(), address=daemon.address, image=base_image(),
    )  # fmt: skip
    bench = Bench(engine, tmp_path)
    sandbox = await bench.start()
    assert await value_of(sandbox, "count", key="k") == 1
    daemon.kill()
    assert await value_of(sandbox, "count", key="k") == 2
    with pytest.raises(FabricUnavailable, match=r"d\.sock does not answer"):
        await bench.start()
    daemon.start_again()
    # Without --live-restore a daemon ends what it finds.
    await eventually(lambda: sandbox.end_cause is not None, "it is known to be lost", 60.0)
    with pytest.raises(SandboxLost):
        await call(sandbox, "echo", {"text": "anybody?"})
    again = await bench.start()
    assert await value_of(again, "count", key="k") == 1
    await engine.stop([again.instance_id])
    assert await engine.running() == []
    await engine.close()
