"""A Docker daemon for one test, which may break it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from aenv_ray.testing.contract_bench import pause_s
from tests.contract.processes import naming, signal_all

_UP_S = 60.0
_SHIM_END_S = 20.0
"""How long a terminated shim may take before it is killed."""


class OwnDaemon:
    """A Docker daemon with its own directories, without a bridge.

    Args:
        root: Its directories; None for new ones.
        image: Copied into it from the machine's daemon.
    """

    def __init__(self, root: Path | None = None, image: str | None = None) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
        self.address = f"unix://{self.root}/d.sock"
        self._environment = dict(os.environ)  # chaos finds its own processes by their environment
        # As with systemd: containerd outlives the daemon, and containers outlive both.
        with (self.root / "containerd.log").open("ab") as log:
            self.containerd = subprocess.Popen(
                [
                    "containerd", "--address", str(self.root / "c.sock"), "--config", os.devnull,
                    "--root", str(self.root / "croot"), "--state", str(self.root / "cstate"),
                ],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.start()
        if image is not None:
            command = f"docker save {image} | docker --host {self.address} load"
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", command], check=True, capture_output=True
            )

    def start(self) -> None:
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    # In its own network: a daemon without a bridge deletes the one that it finds.
                    "unshare", "--net", "--", "dockerd", "--host", self.address,
                    "--containerd", str(self.root / "c.sock"),
                    "--data-root", str(self.root / "data"),
                    "--exec-root", str(self.root / "exec"), "--pidfile", str(self.root / "pid"),
                    "--bridge=none", "--iptables=false", "--ip-masq=false",
                ],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        begun = time.monotonic()
        while (looked := time.monotonic()) and self.run("version", check=False).returncode:
            words = (self.root / "log").read_text()[-2000:]
            assert self.process.poll() is None, words
            now = time.monotonic()
            assert now - begun < _UP_S, words
            time.sleep(pause_s(now - begun, now - looked))

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = ["docker", "--host", self.address, *arguments]
        return subprocess.run(command, capture_output=True, check=check, timeout=120)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        names = self.run("ps", "--all", "--quiet", check=False).stdout.decode().split()
        for process in (self.process, self.containerd):
            process.terminate()
            process.wait(60)
        signal_all(pids(f"aenv_ray.engines.docker.janitor {self.root}"))
        begun = time.monotonic()
        while pids(str(self.root)) and (waited := time.monotonic() - begun) < 2 * _SHIM_END_S:
            # Shims of containers that were left, or were being created when containerd ended.
            number = signal.SIGTERM if waited < _SHIM_END_S else signal.SIGKILL
            signal_all(pids(f"-address {self.root}"), number)
            time.sleep(0.1)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for target in sorted((m.split()[1] for m in mounts), reverse=True):
            if target.startswith(str(self.root)):
                subprocess.run(["umount", "--lazy", target], check=False)
        shutil.rmtree(self.root, ignore_errors=True)
        assert pids(str(self.root)) == []
        assert names == []


def pids(mark: str) -> list[int]:
    return list(naming(mark))
