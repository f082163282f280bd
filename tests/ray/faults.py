"""What tests of faults need: a bounded wait, processes to find and kill, a witness outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from aenv_ray.testing.contract_bench import pause_s

T = TypeVar("T")

PROBE = Path(__file__).parent / "projects" / "probe"
GONE_S = 60.0
"""How long a test waits for what has to go. Ten seconds are promised (invariant 3), which a busy
machine need not keep; `aenv_ray.testing.chaos` measures them."""
_SAYS = "the driver says "


def eventually(
    predicate: Callable[[], T], deadline_s: float = GONE_S, what: Callable[[], object] = lambda: ""
) -> T:
    """Return the first true value of `predicate`; fail when there is none within `deadline_s`.

    `what` is asked for the message of the failure.
    """
    began = looked = time.monotonic()
    while not (value := predicate()):
        now = time.monotonic()
        assert now < began + deadline_s, f"not within {deadline_s:g} s: {what()}"
        threading.Event().wait(pause_s(now - began, now - looked))
        looked = time.monotonic()
    return value


def eventually_empty(look: Callable[[], Sized], deadline_s: float = GONE_S) -> None:
    """Wait until `look` finds nothing; fail with what it still finds after `deadline_s`."""
    eventually(lambda: not look(), deadline_s, lambda: f"still there: {look()}")


# --- processes -----------------------------------------------------------------------------------


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process of this test."""
    os.kill(pid, number)


def stop(pid: int) -> None:
    """SIGSTOP a process; none of its threads runs any more then, which may take a busy machine."""
    kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        try:
            stats = [
                path.joinpath("stat").read_text(errors="replace") for path in threads.iterdir()
            ]
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread ended: it ran
        return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}

    eventually(is_stopped, what=lambda: f"process {pid} runs on")


def processes_of(root: Path) -> dict[int, str]:
    """Return the live processes that name `root` in their arguments or environment.

    `root` is a directory of one test cluster, so these are Ray's processes, launchers, templates
    and sandboxes of that cluster and nobody else's.
    """
    mark = os.fsencode(root)
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            if not command:  # a zombie, or a thread of the kernel
                continue
            if mark in command or mark in Path("/proc", name, "environ").read_bytes():
                found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")[:150]
        except OSError:
            continue
    return found


def settled(look: Callable[[], list[int]]) -> list[int]:
    """Return what two looks in a row agree on; what is just being forked has no name yet."""
    found: list[list[int]] = [look()]

    def agree() -> bool:
        found.append(look())
        return sorted(found[-1]) == sorted(found[-2])

    eventually(agree, what=lambda: f"it never settled: {found[-2:]}")
    return found[-1]


def launcher_pids(directory: Path) -> list[int]:
    """Return the launchers of a node directory: normally one."""
    return [
        pid
        for pid, command in processes_of(directory).items()
        if "aenv_ray.engines.process.launcher" in command and str(directory) in command
    ]


def actor_pid(actor: Any) -> int:
    """Return the process of an actor."""
    import ray

    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))


def host_of(handle: Any) -> Any:
    """Return the actor that hosts an instance."""
    import ray

    from aenv_ray.actors.ray_shell import ray_api

    return ray_api.find_actor(ray.get(handle.info.remote()).host)


# --- a witness -----------------------------------------------------------------------------------


class Witness:
    """Receives what the tools of the probe project send, even if their sandbox ends."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._sock.bind(("127.0.0.1", 0))
        self._sock.setblocking(False)
        self._heard: list[str] = []

    @property
    def variables(self) -> dict[str, str]:
        """What an instance must be created with to speak to this witness."""
        return {"PROBE_WITNESS": str(self._sock.getsockname()[1])}

    def heard(self) -> list[str]:
        """Return everything that was said so far."""
        while True:
            try:
                self._heard.append(self._sock.recv(65_536).decode())
            except BlockingIOError:
                return list(self._heard)

    def wait_for(self, text: str, deadline_s: float = GONE_S) -> None:
        """Wait until somebody said `text`."""
        eventually(lambda: text in self.heard(), deadline_s, lambda: f"{text!r} in {self._heard}")

    def close(self) -> None:
        self._sock.close()


# --- other drivers -------------------------------------------------------------------------------


class Driver:
    """A Python program in its own process, which reports one JSON value and waits.

    Args:
        source: Its body; it calls ``say(value)`` once.
        environment: Added to this process's variables; None as value removes one.
        inside: A command that runs another in namespaces of its own.
    """

    def __init__(
        self, source: str, environment: Mapping[str, str | None], inside: Sequence[str] = ()
    ) -> None:
        prelude = "import json, os, sys, ray, aenv_ray\n"
        # Written at once, and on a line of its own whatever Ray's threads are printing meanwhile.
        prelude += (
            "def say(value):\n"
            f"    sys.stdout.write('\\n' + {_SAYS!r} + json.dumps(value) + '\\n')\n"
            "    sys.stdout.flush()\n"
        )
        merged = {**os.environ, **environment}
        # A pipe that nobody reads fills up, and the driver waits for ever to print.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # `close` closes it
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-c", f"{prelude}\n{source}\nsys.stdin.read()\n"],
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def said(self) -> Any:
        """Return what it said; fails with its traceback when it said nothing."""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Ray's own warnings come there too
            if line.startswith(_SAYS):
                return json.loads(line.removeprefix(_SAYS))
        self._errors.seek(0)
        raise AssertionError(f"the driver said nothing: {self._errors.read()[-4000:]}")

    def errors(self) -> list[str]:
        """Return the lines that it has written to standard error."""
        number = self._errors.fileno()  # whose position it writes at
        written = os.pread(number, os.fstat(number).st_size, 0)
        return written.decode(errors="replace").splitlines()

    def kill(self) -> None:
        """SIGKILL: it cannot clean up."""
        self.process.kill()
        self.process.wait(30)

    def finish(self) -> None:
        """Let it end by itself."""
        self.process.communicate(timeout=60)

    def close(self) -> None:
        """End it, however it is."""
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()


def without(values: Iterable[T], others: Iterable[T]) -> list[T]:
    """Return `values` that are not among `others`, in order."""
    known = set(others)
    return [value for value in values if value not in known]
