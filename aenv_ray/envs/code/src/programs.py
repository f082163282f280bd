"""Programs and files of the agent."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_OUTPUT_BYTES: Final = 64 * 1024
"""Limit of each of stdout and stderr; what follows is read and dropped."""
_LOOK_S: Final = 1.0


def run(code: str, stdin: str, timeout_s: float) -> dict[str, Any]:
    """Run Python code in the working directory and return what became of it."""
    process = subprocess.Popen(
        [sys.executable, "-s", "-S", "-E", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        given = stdin.encode("utf-8", "replace")
        outputs, has_ended = communicate(process, given, timeout_s, _OUTPUT_BYTES + 1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    texts = [bytes(output[:_OUTPUT_BYTES]).decode("utf-8", "replace") for output in outputs]
    return {
        "exit_code": process.returncode,
        "stdout": texts[0],
        "stderr": texts[1],
        "timed_out": not has_ended,
        "truncated": any(len(output) > _OUTPUT_BYTES for output in outputs),
    }


def communicate(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    timeout_s: float,
    most_bytes: int,
    look: Callable[[], None] = lambda: None,
) -> tuple[list[bytearray], bool]:
    """Return both outputs of a process and whether it ended in time.

    `Popen.communicate` cannot do this: if its timeout passes before all input is sent, the next
    call sends no more of it.

    Args:
        process: Its three streams are pipes.
        stdin: Its input.
        timeout_s: How long it may take.
        most_bytes: Of each output; the rest is read and dropped.
        look: Called about every second in which the process neither reads nor writes.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    view = memoryview(stdin)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, *outputs):
            os.set_blocking(stream.fileno(), False)
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():  # a program may close its outputs before it has read its input
            ready = selector.select(min(_LOOK_S, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return list(outputs.values()), False
            if not ready:
                look()
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    with contextlib.suppress(BlockingIOError):
                        try:
                            view = view[os.write(key.fd, view[:65536]) :]
                        except BrokenPipeError:
                            view = view[:0]
                    if not view:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                stream = next(one for one in outputs if one is key.fileobj)
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(stream)
                outputs[stream] += data[: most_bytes - len(outputs[stream])]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    return list(outputs.values()), process.returncode is not None


def read(path: str, most_bytes: int) -> str:
    """Return the text of a file in the working directory.

    Raises:
        ValueError: It is not in the working directory, no regular file, too long or not UTF-8.
        OSError: It cannot be opened.
    """
    here = Path.cwd().resolve()
    real = Path(path).resolve()
    if not real.is_relative_to(here):
        raise ValueError(f"{path} is not in the work directory")
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"{path} has {status.st_size} bytes; the limit is {most_bytes}")
        return file.read(most_bytes).decode("utf-8")
