"""A project's HTTP server as a child process that ends with the command that started it."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aenv_ray.errors import ConfigError, boundary

STOP_GRACE_S: Final = 1.5
"""Time between SIGTERM and SIGKILL; keeps Ctrl-C below two seconds."""
KEPT_LINES: Final = 200
"""Lines of hidden output that are stored and shown if the process fails."""
_LISTENING: Final = re.compile(rb"environment server listening on (http://\S+:(\d+))")
_CHUNKS_AT_ONCE: Final = 64
"""Limit per read, so that a server that writes endlessly can still be supervised."""
_LIST_TIMEOUT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, output: int | None
) -> subprocess.Popen[bytes]:
    """Start a process in a new session; on Linux it is killed when this process dies.

    Raises:
        ConfigError: It cannot be started.
    """
    with boundary(ConfigError, f"{command[0]} cannot be started"):
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the child
            preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509  # we have one thread
        )


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that sends the child `number` when this thread dies.

    Returns:
        None if the system does not support it; only Linux does.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: few calls are safe between fork and exec
    parent = os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return bind


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of `spawn` and its children, within `STOP_GRACE_S`, any number of times."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
    finally:  # also after a second Ctrl-C
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalServer:
    """A process ``python -m aenv_ray.runtime``; its output goes to our standard error.

    Args:
        project: The project's directory; also the working directory, as in an image.
        host: Address to listen on.
        port: 0 chooses a free port.
        environment: All environment variables of the server.
        log_level: ``DEBUG`` logs every request.
        quiet: Only store the output, for `kept_output`.

    Raises:
        ConfigError: The process cannot be started.
    """

    def __init__(
        self,
        project: Path,
        *,
        host: str,
        port: int,
        environment: Mapping[str, str],
        log_level: str,
        quiet: bool,
    ) -> None:
        self.url: str | None = None
        """Its address on this machine; None until it listens."""
        self.port = port
        self._quiet = quiet
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._lines_seen = 0
        self._partial = b""
        command = [sys.executable, "-m", "aenv_ray.runtime", str(project), "--strict"]
        self._process = spawn(
            [*command, "--host", host, "--port", str(port), "--log-level", log_level],
            environment={**environment, "PYTHONUNBUFFERED": "1"},
            cwd=project,
            output=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)

    def pump(self, timeout_s: float) -> int | None:
        """Wait up to `timeout_s` for output and pass it on.

        Returns:
            The exit code once the server has ended and all output is passed on, else None.
        """
        ready, _, _ = select.select([self._pipe], [], [], timeout_s)
        # Checked before the last read, so that no output is missed.
        code = self._process.poll()
        if ready and not self._read() and code is None:
            # The output has ended, and the process is about to.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout_s)
        if self._partial and (code is not None or not ready):
            self._emit(self._partial)
            self._partial = b""
        return code

    def _read(self) -> bool:
        """Pass on the available output; return whether there may be more."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(self._pipe, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                self._emit(line + b"\n")
        return True

    def _emit(self, line: bytes) -> None:
        match = _LISTENING.match(line) if self.url is None else None
        if match:
            self.port = int(match[2])
            self.url = _reachable(match[1].decode())
            return
        self._lines_seen += 1
        self._kept.append(line)
        if not self._quiet:
            sys.stderr.flush()
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()

    def kept_output(self) -> str:
        """Return the last lines of output, with the number of omitted ones."""
        text = b"".join(self._kept).decode(errors="replace")
        cut = self._lines_seen - len(self._kept)
        return f"[{cut} earlier lines omitted]\n{text}" if cut else text

    def tools(self) -> list[str]:
        """Return the names of the server's tools; none if it does not answer."""
        address = urlsplit(self.url or "")
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        try:
            connection = http.client.HTTPConnection(
                address.hostname or "", address.port, timeout=_LIST_TIMEOUT_S
            )
            with contextlib.closing(connection):
                connection.request("POST", "/mcp", json.dumps(body), headers)
                answer = json.loads(connection.getresponse().read())
            return [tool["name"] for tool in answer["result"]["tools"]]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return []

    def stop(self) -> None:
        """End the server within `STOP_GRACE_S`, and pass on its last output."""
        stop(self._process)
        self.pump(0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _reachable(url: str) -> str:
    """Return `url` with a loopback address if the server listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
