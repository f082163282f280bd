"""Process 1 of the container of an instance in a pod.

The pod starts with a small program that listens on the pod's address. It receives this runtime, the
project and a boot order from the peer that knows the secret (`aenv_ray.engines.kubernetes.boot`),
has another container unpack them to mounts that are read-only here, and then calls `main` in the
same process. Meanwhile that program has started the instance's process and let it import what needs
no order. `main` tells it what to run (`aenv_ray.runtime.container.process_one`) and supervises it.
The instance's process has no access to the key, the log and the deadlines, which are in this
process. A host connects for one of three purposes:

- ``door``: the connection is handed over to the instance's process, which serves the fast door.
- ``control``: JSON lines. ``{"ends_in_s": 60}`` moves the deadline and is answered with
  ``{"ok": true}``; ``{"ended": cause, "inside": what, "log": text}`` reports the end of the
  instance's process.
  Without a control connection for `grace_s` the instance has no owner, and everything ends.
- ``logs``: the output of the instance.

Imports are few, since every pod has this process in addition to the instance's.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from aenv_ray.runtime.container import handshake
from aenv_ray.runtime.container.connection_handover import hand_over
from aenv_ray.runtime.container.image_volumes import MOUNTS, image_volumes
from aenv_ray.runtime.container.pod_log import PodLog
from aenv_ray.runtime.system import linux
from aenv_ray.runtime.system.signals import ignore_signals_from_inside

TTL_PASSED: Final = "its TTL passed"
HOST_GONE: Final = "its host is gone"
ENDED_BY_SIGTERM: Final = "its main process was ended by SIGTERM"
"""Whether that came from outside is not known here: see `_is_from_outside`."""
TERMINATION_LOG: Final = "/dev/termination-log"
_MEMORY: Final = Path("/sys/fs/cgroup")
_HANDSHAKE_S: Final = 10.0
_FIRST_HOST_S: Final = 5.0
"""How much later than its deadline an instance ends that no host has controlled yet: the report of
its start comes first."""
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Without keep-alive, the connection of a host whose node is gone would stay open for hours."""
_SI_USER: Final = 0
"""Code of a signal from kill(2); see sigaction(2)."""
_KILLED_EXIT: Final = 128 + signal.SIGKILL
_SIGTERM_S: Final = 0.5
"""How much later than the instance's process this one may hear of a SIGTERM: a node that shuts down
sends it to every process of a pod."""
_MIN_TIMEOUT_S: Final = 0.001
"""A socket timeout of 0 would make the socket non-blocking."""
_READERS_S: Final = 5.0
"""How long the container waits for readers of the log after the instance has ended."""
_PIECE_BYTES: Final = 65_536
_SERVE: Final = (
    # Our libraries last: a version that the image has is the one that the environment wants.
    "import sys; sys.path.insert(0, '{home}/runtime'); sys.path.append('{home}/lib'); "
    "from aenv_ray.runtime.container.process_one import main; main({arguments})"
)


def main(
    listener: socket.socket,
    boot: socket.socket,
    order: Mapping[str, Any],
    instance: Mapping[str, Any],
) -> NoReturn:
    """Start the instance, report whether it is up, and supervise it until its end.

    Args:
        listener: The listening socket, on the pod's address.
        boot: The connection that delivered the order; it gets one JSON line, ``{"ready": facts}``
            or ``{"failed": text}``, and is closed.
        order: ``file_bytes`` (limit of a file; 0 for none), ``home`` (a directory), ``key`` (hex),
            ``mounts`` (the paths of the pod's volumes in this container), ``unpack`` (for the
            unpacker: ``hidden`` is the directory to hide, or ""),
            ``variables, arguments, serving, absence, directory, server, boot_s, ends_in_s,
            grace_s``.
        instance: The process of the instance, which waits: ``pid``, ``link`` (a socket to it),
            ``link_fd`` (the other end, in it), ``out`` (the pipe of its output), ``command`` (what
            starts Python here); and ``unpacker``, the connection to the container that unpacked the
            project.
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the key is in this process
    linux.set_process_name("aenv-pod")
    if order["file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
    termination_log = TerminationLog()
    key = bytes.fromhex(order["key"])
    supervisor = Supervisor(listener, key, order["grace_s"], termination_log, instance["link"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ignore_signals_from_inside()
    known = order["mounts"]
    if known is not None and (volumes := image_volumes(MOUNTS.read_text(), known)):
        boot.sendall(json.dumps({"failed": _unlimited(volumes)}).encode() + b"\n")
        os._exit(1)
    supervisor.start(order, instance)
    threading.Thread(target=_end_on_sigterm, args=(supervisor,), daemon=True).start()
    report = supervisor.await_boot(order["boot_s"])
    if "ready" in report and order["unpack"]["hidden"]:
        report = _hide_source(instance["unpacker"]) or report
    instance["unpacker"].close()
    if "ready" in report:
        supervisor.accept_hosts()
    with contextlib.suppress(OSError), boot:  # without a host everything ends
        boot.sendall(json.dumps(report).encode() + b"\n")
    os._exit(supervisor.wait())


def _unlimited(volumes: list[str]) -> str:
    where = ", ".join(volumes)
    return (
        f"the image declares volumes ({where}), and nothing limits what is written there: set "
        "ignore_image_defined_volumes = true in containerd's configuration on the nodes, or make "
        "an image without them: docker export CONTAINER | docker import - IMAGE"
    )


def _hide_source(unpacker: socket.socket) -> dict[str, str] | None:
    """Have the sources of the project removed; return the report of a failure."""
    with contextlib.suppress(OSError, ValueError), unpacker.makefile("rb") as answers:
        unpacker.sendall(b"hide\n")
        if "ok" in json.loads(answers.readline()):
            return None
    return {"failed": "its sources were not removed, as hideSource asks: its unpacker has ended"}


class Supervisor:
    """Supervises the process of one instance, and serves its hosts.

    Args:
        listener: The listening socket, on the pod's address.
        key: The key of the instance.
        grace_s: How long the instance runs without a host.
        termination_log: Path of the container's termination log.
        link: The connection to the instance's process.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        grace_s: float,
        termination_log: TerminationLog,
        link: socket.socket,
    ) -> None:
        self._listener = listener
        self._key = key
        self._grace_s = grace_s
        self._log = PodLog()
        self._link = link
        self._linking = threading.Lock()
        self._changed = threading.Condition()
        self._deadline = 0.0
        self._unowned_since: float | None = None
        self._was_owned = False
        self._control_connections: set[socket.socket] = set()
        self._log_readers: set[threading.Thread] = set()
        self._pid = 0
        self._cause = ""
        self._inside: str | None = None
        """What in the sandbox caused its end, as the host's error tree names it; None: nothing."""
        self._code = 0
        self._sigterm = threading.Event()
        self._termination_log = termination_log
        self._log_writer: threading.Thread | None = None

    # --- the instance's process ---------------------------------------------------------------

    def start(self, order: Mapping[str, Any], instance: Mapping[str, Any]) -> None:
        """Tell the waiting process what to serve; the arguments are those of `main`."""
        self._deadline = time.monotonic() + order["ends_in_s"]
        arguments = [order[name] for name in ("serving", "absence", "directory")]
        words = [*map(repr, arguments), repr(tuple(order["server"])), str(instance["link_fd"])]
        told = {
            "command": instance["command"],
            "code": _SERVE.format(home=order["home"], arguments=", ".join(words)),
            "arguments": order["arguments"],
            "variables": {**_image_variables(), **order["variables"]},
            "file_bytes": order["file_bytes"],
        }
        message = json.dumps(told).encode()
        self._pid = instance["pid"]
        with contextlib.suppress(OSError):  # it has ended, which `await_boot` reports
            self._link.sendall(len(message).to_bytes(8, "big") + message)
        reading = threading.Thread(target=self._read_output, args=(instance["out"],), daemon=True)
        self._log_writer = reading
        reading.start()
        threading.Thread(target=self._watch_deadlines, daemon=True).start()

    def await_boot(self, within_s: float) -> dict[str, Any]:
        """Return the report of the instance's process; without a report in time it is killed.

        Args:
            within_s: Time limit.
        """
        data, ends = bytearray(), time.monotonic() + within_s
        while not data.endswith(b"\n"):
            try:
                self._link.settimeout(max(_MIN_TIMEOUT_S, ends - time.monotonic()))
                piece = self._link.recv(_PIECE_BYTES)
            except TimeoutError:
                return self._failed_boot(f"it was not up after {within_s:g} s")
            if not piece:
                return self._failed_boot()
            data += piece
        self._link.settimeout(None)
        try:
            return dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):  # the project's code wrote to the link
            return self._failed_boot("its process sent a malformed report of its start")

    def _failed_boot(self, cause: str = "") -> dict[str, Any]:
        """Return the report of a failed start, when all processes have ended.

        Args:
            cause: Why the instance's process is killed. "": it ends by itself.
        """
        if cause:
            self._cause = cause
            os.kill(self._pid, signal.SIGKILL)
        self._wait_for_end()
        tail = self._log.tail.decode(errors="replace").strip()
        return {"failed": f"{self._cause}; the end of its log:\n{tail}" if tail else self._cause}

    def accept_hosts(self) -> None:
        """Accept hosts; from now on the instance ends when it has had none for `grace_s`."""
        with self._changed:
            self._unowned_since = time.monotonic()
            self._changed.notify()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self) -> int:
        """Wait for the end of the instance's process, report it, and return its exit code.

        It is 0 at the deadline, as at a release: monitoring reports nothing as failed.
        """
        self._wait_for_end()
        tail = self._log.tail
        self._termination_log.write({"cause": self._cause, "inside": self._inside}, tail)
        with self._changed:
            controls = list(self._control_connections)
        for control in controls:
            ended = {"ended": self._cause, "inside": self._inside}
            _say(control, {**ended, "log": tail.decode(errors="replace")})
        if self._cause == ENDED_BY_SIGTERM:
            return 0  # at once
        end = time.monotonic() + _READERS_S
        for reader in list(self._log_readers):
            reader.join(max(0.0, end - time.monotonic()))
        code = 0 if self._cause == TTL_PASSED else self._code
        # A container with that code counts as killed: it would have left no message.
        return 1 if code == _KILLED_EXIT else code

    def end_by_sigterm(self) -> None:
        """End as Kubernetes asks for, and write the termination log after all others have ended."""
        self._cause = self._cause or ENDED_BY_SIGTERM
        self._sigterm.set()
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)

    def _wait_for_end(self) -> None:
        """Wait for the end of the instance's process, note the cause, and kill all others."""
        if self._pid:
            pid, status = 0, 0
            while pid != self._pid or os.WIFSTOPPED(status):
                # Other pids are orphans, which process 1 adopts.
                pid, status = os.waitpid(-1, os.WUNTRACED)
                if pid == self._pid and os.WIFSTOPPED(status):
                    # By a process of the agent: a stopped instance would answer no call.
                    if not self._cause:
                        self._cause, self._inside = "its main process was stopped", "signal"
                    os.kill(pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(status)
            if self._code == -signal.SIGTERM:
                self._sigterm.wait(_SIGTERM_S)
            if not self._cause:
                self._cause, self._inside = _cause(self._code)
            self._code = self._code if self._code >= 0 else 128 - self._code
            self._pid = 0
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            if self._log_writer is not None:
                self._log_writer.join(_READERS_S)
            self._log.end()

    def _read_output(self, out: int) -> None:
        while data := os.read(out, _PIECE_BYTES):
            self._log.add(data)
            with contextlib.suppress(OSError):  # the container's log on the node
                os.write(1, data)

    # --- deadlines --------------------------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        """Kill the instance at its deadline, or when it had no owner for too long."""
        with self._changed:
            while True:
                now = time.monotonic()
                late_s = 0.0 if self._was_owned else _FIRST_HOST_S
                ends = [(self._deadline + late_s, TTL_PASSED)]
                if self._unowned_since is not None:
                    ends.append((self._unowned_since + self._grace_s, HOST_GONE))
                at, cause = min(ends)
                if at <= now:
                    break
                self._changed.wait(at - now)
            self._cause = self._cause or cause
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    # --- hosts --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # out of descriptors
                continue
            try:
                threading.Thread(target=self._serve_host, args=(sock,), daemon=True).start()
            except RuntimeError:  # the agent's processes leave no room; the host tries again
                sock.close()
                time.sleep(0.05)

    def _serve_host(self, sock: socket.socket) -> None:
        with sock:
            try:
                purpose = self._authenticate(sock)
                if purpose is None:
                    return
                kind = purpose["kind"]
                if kind == "door":
                    with self._linking:
                        hand_over(self._link, sock)
                elif kind == "control":
                    self._serve_control(sock)
                elif kind == "logs":
                    self._serve_logs(sock, purpose)
            except (OSError, ValueError, KeyError):
                return  # the peer is gone, or speaks another protocol

    def _authenticate(self, sock: socket.socket) -> dict[str, Any] | None:
        """Return the purpose of a connection; None if the peer is not the instance's host."""
        sock.settimeout(_HANDSHAKE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, name, value)
        purpose = handshake.accept_host(sock, self._key)
        sock.settimeout(None)
        return purpose

    def _serve_control(self, sock: socket.socket) -> None:
        with self._changed:
            self._control_connections.add(sock)
            self._unowned_since = None
            self._was_owned = True
            self._changed.notify()
        try:
            with sock.makefile("rb") as lines:
                for line in lines:
                    ends_in_s = float(json.loads(line)["ends_in_s"])
                    with self._changed:
                        self._deadline = time.monotonic() + ends_in_s
                        self._changed.notify()
                    _say(sock, {"ok": True})
        finally:
            with self._changed:
                self._control_connections.discard(sock)
                if not self._control_connections:
                    self._unowned_since = time.monotonic()
                self._changed.notify()

    def _serve_logs(self, sock: socket.socket, purpose: Mapping[str, Any]) -> None:
        self._log_readers.add(threading.current_thread())
        try:
            for piece in self._log.read(purpose["tail_lines"], purpose["follow"]):
                sock.sendall(piece)
        finally:
            self._log_readers.discard(threading.current_thread())


def _image_variables() -> dict[str, str]:
    """Return the variables of the image, without those of the cluster and the engine."""
    ours = ("KUBERNETES_", "AENV_POD_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _end_on_sigterm(supervisor: Supervisor) -> None:
    """End the pod, with exit code 0, at a SIGTERM from outside it.

    A released pod then counts as succeeded, and monitoring reports no failure.
    """
    while not _is_from_outside(signal.sigwaitinfo({signal.SIGTERM})) and os.getpid() == 1:
        pass  # from a process of the agent
    supervisor.end_by_sigterm()


def _is_from_outside(info: signal.struct_siginfo) -> bool:
    """Return whether a signal looks as if `kill` sent it from outside this pid namespace.

    Such a sender has no process id here. A process of the agent has one, or, with
    rt_sigqueueinfo(2), another code. But if it first fills the queue of its user's pending signals,
    the kernel forgets both. So the host asks the API why the pod ended
    (`aenv_ray.engines.kubernetes.pod_status.unexplained_end`).
    """
    return info.si_pid == 0 and info.si_code == _SI_USER


class TerminationLog:
    """What Kubernetes reports about a container that ended.

    It is opened before any code of the environment runs, which may have the same user: a change of
    its permissions does not keep this process from writing.
    """

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # not in a pod
            self._fd = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, cause: Mapping[str, str | None], log: bytes) -> None:
        """Replace its content with a cause and the end of the log."""
        words = {**cause, "log": base64.b64encode(log).decode()}
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(words).encode(), 0)


def _cause(code: int) -> tuple[str, str | None]:
    """Return why the instance's process ended, and what in the sandbox caused that."""
    if code >= 0:
        return f"its main process exited with code {code}", "exit"
    if code == -signal.SIGKILL and _ran_out_of_memory():
        limit = (_MEMORY / "memory.max").read_text().strip()
        if not limit.isdigit():
            return "it ran out of memory and was killed (the node had no more)", None
        bound = f"limit {int(limit) >> 20} MiB"
        return f"it ran out of memory and was killed ({bound})", "memory"
    # Another process of the pod sent it: from outside, only process 1 is killed.
    return f"its main process was killed by {signal.Signals(-code).name}", "signal"


def _ran_out_of_memory() -> bool:
    try:
        words = (_MEMORY / "memory.events").read_text().split()
        return int(words[words.index("oom_kill") + 1]) > 0
    except (OSError, ValueError):
        return False


def _say(sock: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the host is gone
        sock.sendall(json.dumps(message).encode() + b"\n")
