"""Process 1 of a container in a pod that holds an instance.

What the pod was made with listens on the pod's address and takes, from whoever has the secret, this
runtime, the project and an order (`aenv_ray.engines.kubernetes.boot`); then `main` goes on in the
same process. It starts the process that serves the instance
(`aenv_ray.runtime.container.process_one`), which has no key, and keeps what that must not: the key,
the log, and the times at which all ends. A host connects for one of three purposes:

- ``door``: handed over to the instance's process, which serves the fast door on it.
- ``control``: JSON lines. ``{"ends_in_s": 60}`` moves the deadline, answered by ``{"ok": true}``;
  ``{"ended": cause, "log": text}`` is told when the instance's process ends. Without any such
  connection for a while everything ends: nobody owns the instance any more.
- ``logs``: what the instance printed, as it is.

It imports what this needs and no more: every pod has this process beside the instance's own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime.container import host_proof as pod_door
from aenv_ray.runtime.container.connection_handover import hand_over
from aenv_ray.runtime.container.pod_log import PodLog
from aenv_ray.runtime.system import linux

TTL_PASSED: Final = "its TTL passed"
HOST_GONE: Final = "its host is gone"
TERMINATION_LOG: Final = "/dev/termination-log"
_MEMORY: Final = Path("/sys/fs/cgroup")
_GREETING_S: Final = 10.0
_START_S: Final = 5.0
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A host whose node is gone says nothing, and is not a host for hours."""
_LEAST_S: Final = 0.001
"""Of a timeout: a socket takes none for not to wait."""
_READERS_S: Final = 5.0
"""How long an instance that ended waits for those who still read what it printed."""
_PIECE_BYTES: Final = 65_536
_SERVE: Final = (
    # The libraries last: what the image has of them is what the environment wants.
    "import sys; sys.path.insert(0, '{home}/runtime'); sys.path.append('{home}/lib'); "
    "from aenv_ray.runtime.container.process_one import main; main({arguments})"
)


def main(listener: socket.socket, boot: socket.socket, order: Mapping[str, Any]) -> NoReturn:
    """Start what is ordered, tell whether it is up, and keep it until its end.

    Args:
        listener: On the pod's address.
        boot: The connection that brought the order; told one JSON line, ``{"ready": facts}`` or
            ``{"failed": text}``, and closed.
        order: ``home, project`` (directories), ``key`` (hex), ``variables, arguments, serving,
            absence, directory, server, hide_source, boot_s, ends_in_s, grace_s``.
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the key is in this process
    linux.set_process_name("aenv-pod")
    keeper = Keeper(listener, bytes.fromhex(order["key"]), order["grace_s"])
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    keeper.start(order)
    report = keeper.await_boot(order["boot_s"])
    if "ready" in report and order["hide_source"]:
        for path in Path(order["project"]).iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if "ready" in report:
        keeper.open()
    with contextlib.suppress(OSError), boot:  # a host that is gone ends everything by that
        boot.sendall(json.dumps(report).encode() + b"\n")
    os._exit(keeper.wait())


class Keeper:
    """Keeps one instance's process.

    Args:
        listener: On the pod's address.
        key: Of the instance.
        grace_s: How long it goes on without a host.
    """

    def __init__(self, listener: socket.socket, key: bytes, grace_s: float) -> None:
        self._listener = listener
        self._key = key
        self._grace_s = grace_s
        self._log = PodLog()
        self._link, self._childs = socket.socketpair()
        self._linking = threading.Lock()
        self._times = threading.Condition()
        self._deadline = 0.0
        self._unowned_since: float | None = None
        self._was_owned = False
        self._controls: set[socket.socket] = set()
        self._readers: set[threading.Thread] = set()
        self._pid = 0
        self._cause = ""
        self._code = 0
        self._pump: threading.Thread | None = None

    # --- the instance's process ---------------------------------------------------------------

    def start(self, order: Mapping[str, Any]) -> None:
        """Start the process that serves the instance."""
        self._deadline = time.monotonic() + order["ends_in_s"]
        arguments = [order[name] for name in ("serving", "absence", "directory")]
        words = [*map(repr, arguments), repr(tuple(order["server"])), str(self._childs.fileno())]
        code = _SERVE.format(home=order["home"], arguments=", ".join(words))
        out, into = os.pipe()
        with self._childs:
            child = subprocess.Popen(
                [*_own_command(), "-c", code, *order["arguments"]],
                env={**_image_variables(), **order["variables"]},
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=into,
                pass_fds=[self._childs.fileno()],
            )
        os.close(into)
        self._pid = child.pid
        self._pump = threading.Thread(target=self._read_output, args=(out,), daemon=True)
        self._pump.start()
        threading.Thread(target=self._keep_times, daemon=True).start()

    def await_boot(self, within_s: float) -> dict[str, Any]:
        """Return what the instance's process says of its start; one that says nothing is ended.

        Args:
            within_s: How long it may take.
        """
        data, ends = bytearray(), time.monotonic() + within_s
        while not data.endswith(b"\n"):
            try:
                self._link.settimeout(max(_LEAST_S, ends - time.monotonic()))
                piece = self._link.recv(_PIECE_BYTES)
            except TimeoutError:
                self._cause = f"it was not up after {within_s:g} s"
                os.kill(self._pid, signal.SIGKILL)
                piece = b""
            if not piece:
                cause = self._bury()
                tail = self._log.tail.decode(errors="replace").strip()
                return {"failed": f"{cause}; the end of its log:\n{tail}" if tail else cause}
            data += piece
        self._link.settimeout(None)
        return dict(json.loads(data))

    def open(self) -> None:
        """Let hosts in; from now on there has to be one."""
        with self._times:
            self._unowned_since = time.monotonic()
            self._times.notify()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self) -> int:
        """Wait for the end of the instance's process, tell it, and return its exit code."""
        cause = self._bury()
        tail = self._log.tail
        _write_termination_log(cause, tail)
        with self._times:
            controls = list(self._controls)
        for control in controls:
            _say(control, {"ended": cause, "log": tail.decode(errors="replace")})
        end = time.monotonic() + _READERS_S
        for reader in list(self._readers):
            reader.join(max(0.0, end - time.monotonic()))
        return self._code

    def _bury(self) -> str:
        """Wait for the end of the instance's process and of all else; return the cause."""
        if self._pid:
            pid, status = 0, 0
            while pid != self._pid:  # others are orphans that came to process 1
                pid, status = os.waitpid(-1, 0)
            self._code = os.waitstatus_to_exitcode(status)
            self._cause = self._cause or _cause(self._code)
            self._code = self._code if self._code >= 0 else 128 - self._code
            self._pid = 0
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            if self._pump is not None:
                self._pump.join(_READERS_S)
            self._log.end()
        return self._cause

    def _read_output(self, out: int) -> None:
        while data := os.read(out, _PIECE_BYTES):
            self._log.add(data)
            with contextlib.suppress(OSError):  # the node's own log of the container
                os.write(1, data)

    # --- times --------------------------------------------------------------------------------

    def _keep_times(self) -> None:
        """End the instance at its deadline, or when nobody has owned it for too long."""
        with self._times:
            while True:
                now = time.monotonic()
                # Until there is a host, a little later: that its start went well is told first.
                late_s = 0.0 if self._was_owned else _START_S
                ends = [(self._deadline + late_s, TTL_PASSED)]
                if self._unowned_since is not None:
                    ends.append((self._unowned_since + self._grace_s, HOST_GONE))
                at, cause = min(ends)
                if at <= now:
                    break
                self._times.wait(at - now)
            self._cause = self._cause or cause
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    # --- hosts --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # no room for another one now
                continue
            threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        with sock:
            try:
                purpose = self._greet(sock)
                if purpose is None:
                    return
                kind = purpose["kind"]
                if kind == "door":
                    with self._linking:
                        hand_over(self._link, sock)
                elif kind == "control":
                    self._obey(sock)
                elif kind == "logs":
                    self._show(sock, purpose)
            except (OSError, ValueError, KeyError):
                return  # a peer that is gone, or speaks of something else

    def _greet(self, sock: socket.socket) -> dict[str, Any] | None:
        """Prove that this is the instance's pod to one who proves to be its host."""
        sock.settimeout(_GREETING_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, name, value)
        purpose = pod_door.greet(sock, self._key)
        sock.settimeout(None)
        return purpose

    def _obey(self, sock: socket.socket) -> None:
        with self._times:
            self._controls.add(sock)
            self._unowned_since = None
            self._was_owned = True
            self._times.notify()
        try:
            with sock.makefile("rb") as lines:
                for line in lines:
                    ends_in_s = float(json.loads(line)["ends_in_s"])
                    with self._times:
                        self._deadline = time.monotonic() + ends_in_s
                        self._times.notify()
                    _say(sock, {"ok": True})
        finally:
            with self._times:
                self._controls.discard(sock)
                if not self._controls:
                    self._unowned_since = time.monotonic()
                self._times.notify()

    def _show(self, sock: socket.socket, purpose: Mapping[str, Any]) -> None:
        self._readers.add(threading.current_thread())
        try:
            for piece in self._log.read(purpose["tail_lines"], purpose["follow"]):
                sock.sendall(piece)
        finally:
            self._readers.discard(threading.current_thread())


def _own_command() -> list[str]:
    """Return what starts this Python again, without the directory that it is in on its path."""
    words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    command = [word.decode() for word in words]
    command = [sys.executable] if "-c" not in command else command[: command.index("-c")]
    return command if "-I" in command else [*command, "-P"]  # -I: a Python that was carried here


def _image_variables() -> dict[str, str]:
    """Return what the image, and not the cluster or the engine, has in its environment."""
    ours = ("KUBERNETES_", "AENV_POD_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _end_on_sigterm(*_: object) -> None:
    """End as ordered: a pod that is released has succeeded, and monitoring reports no failure."""
    _write_termination_log("its main process was ended by SIGTERM", b"")
    os._exit(0)


def _write_termination_log(cause: str, log: bytes) -> None:
    words = {"cause": cause, "log": base64.b64encode(log).decode()}
    with contextlib.suppress(OSError):
        Path(TERMINATION_LOG).write_text(json.dumps(words))


def _cause(code: int) -> str:
    if code >= 0:
        return f"its main process exited with code {code}"
    if code == -signal.SIGKILL and _ran_out_of_memory():
        limit = (_MEMORY / "memory.max").read_text().strip()
        bound = f"limit {int(limit) >> 20} MiB" if limit.isdigit() else "the node had no more"
        return f"it ran out of memory and was killed ({bound})"
    return f"its main process was killed by {signal.Signals(-code).name}"


def _ran_out_of_memory() -> bool:
    try:
        words = (_MEMORY / "memory.events").read_text().split()
        return int(words[words.index("oom_kill") + 1]) > 0
    except (OSError, ValueError):
        return False


def _say(sock: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a host that is gone finds out by itself
        sock.sendall(json.dumps(message).encode() + b"\n")
