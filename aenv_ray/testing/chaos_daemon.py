"""A Docker daemon of chaos' own, which it may kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from aenv_ray.errors import FabricUnavailable

_UP_S: Final = 60.0
_END_S: Final = 60.0
_LOOK_S: Final = 0.1


class OwnDaemon:
    """A daemon with directories of its own and no bridge, as root.

    Args:
        image: Copied into it from the machine's own daemon.

    Raises:
        FabricUnavailable: It does not come up.
    """

    def __init__(self, image: str) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="aenv-d", dir="/tmp"))
        self.address = f"unix://{self._root}/d.sock"
        # Of this moment: what names the stage's directories later counts as left by the stage.
        self._environment = dict(os.environ)
        # As where systemd starts it: containers outlive a daemon that is killed.
        self._containerd = self._spawn(
            "containerd", "--address", self._path("c.sock"), "--config", os.devnull,
            "--root", self._path("croot"), "--state", self._path("cstate"),
        )  # fmt: skip
        self.start()
        command = f"docker save {image} | docker --host {self.address} load"
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True, capture_output=True)

    def _path(self, name: str) -> str:
        return str(self._root / name)

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._root / "log").open("ab") as log:
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = self._spawn(
            # Apart, for a daemon without a bridge deletes the one that it finds.
            "unshare", "--net", "--", "dockerd", "--host", self.address,
            "--containerd", self._path("c.sock"), "--data-root", self._path("data"),
            "--exec-root", self._path("exec"), "--pidfile", self._path("pid"),
            "--bridge=none", "--iptables=false", "--ip-masq=false",
        )  # fmt: skip
        ends = time.monotonic() + _UP_S
        ask = ["docker", "--host", self.address, "version"]
        while subprocess.run(ask, capture_output=True, check=False, timeout=_UP_S).returncode:
            if self._process.poll() is not None or time.monotonic() > ends:
                words = (self._root / "log").read_text(errors="replace")[-1000:]
                raise FabricUnavailable(f"the Docker daemon does not come up: {words}")
            time.sleep(_LOOK_S)

    def kill(self) -> None:
        """SIGKILL it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_END_S)

    def end(self) -> None:
        """End it and delete everything it had."""
        for process in (self._process, self._containerd):
            process.terminate()
            process.wait(_END_S)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for target in sorted((line.split()[1] for line in mounts), reverse=True):
            if target.startswith(str(self._root)):
                subprocess.run(["umount", "--lazy", target], check=False)
        shutil.rmtree(self._root, ignore_errors=True)
