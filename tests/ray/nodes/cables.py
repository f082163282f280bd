"""A second machine on this one: a network namespace, and a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NOWHERE: Final = "02:00:00:00:00:01"
"""A hardware address that nobody has: what is sent there is lost without a word."""


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


@contextmanager
def a_cable() -> Iterator[tuple[Cable | None, str]]:
    """Yield a connected cable, or None and why this machine allows none."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        yield None, f"not installed: {', '.join(missing)}"
        return
    cable = Cable()
    try:
        refusal = cable.refusal()
        yield None if refusal else cable, refusal
    finally:
        cable.close()
