"""Commands and files: what every instance offers in addition to the environment's tools.

Paths are absolute or relative to the work directory. The sandbox, not this module, restricts them.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from aenv_ray.runtime.door.calls import kill_tree
from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.system import carried_python

OUTPUT_LIMIT_BYTES: Final = 10 * 1024 * 1024
"""Limit for each of stdout and stderr of a command; more is cut, and reported as cut."""
READ_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Largest part of a file that one call returns."""
_POLL_S: Final = 0.02
"""How often to check whether a program has ended, where the kernel has no pidfd."""
MISSING_PROGRAM: Final = 127
"""Exit code of a shell for a program that does not exist."""
NOT_RUN: Final = 126
"""Exit code of a shell for a program that cannot run, e.g. because it is not executable."""
MAX_MODE: Final = 0o7777


def exec_command(
    command: str | list[str],
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
) -> dict[str, Any]:
    """Run a command to its end.

    Args:
        command: Program and arguments, or text for ``/bin/sh -c``.
        cwd: Working directory. None: the work directory.
        env: Variables in addition to the instance's.
        stdin: Standard input, as base64.

    Returns:
        ``exit_code, stdout, stderr`` (base64), ``truncated, duration_s``; also for a program that
        fails, does not exist or cannot run.
    """
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    if not argv:
        raise Fault("tool_input_invalid", "the command is empty")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**carried_python.variables_for(argv[0]), **(env or {})},
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as exc:
        if cwd is not None and not os.path.isdir(cwd):
            raise Fault("file_access_error", f"working directory {cwd!r}: {exc.strerror}") from exc
        message = f"{argv[0]}: {exc.strerror}\n".encode(errors="replace")
        is_missing = isinstance(exc, FileNotFoundError | PermissionError | NotADirectoryError)
        code = MISSING_PROGRAM if is_missing else NOT_RUN
        return _exec_result(code, b"", message, False, started)
    except ValueError as exc:
        raise Fault("tool_input_invalid", f"command: {exc}") from exc
    try:
        out, err, cut = _communicate(process, decode(stdin) if stdin is not None else b"")
        code = process.wait()
    except BaseException:
        # The call was stopped: end the command and its descendants.
        kill_tree(process.pid)
        process.wait()
        raise
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return _exec_result(code if code >= 0 else 128 - code, out, err, cut, started)


def _exec_result(
    code: int, out: bytes, err: bytes, truncated: bool, started: float
) -> dict[str, Any]:
    return {
        "exit_code": code,
        "stdout": base64.b64encode(out).decode(),
        "stderr": base64.b64encode(err).decode(),
        "truncated": truncated,
        "duration_s": round(time.monotonic() - started, 6),
    }


def _communicate(process: subprocess.Popen[bytes], stdin: bytes) -> tuple[bytes, bytes, bool]:
    """Write stdin and collect both outputs, up to the limit of each.

    Returns when the program has ended and nothing more is readable: a background process that keeps
    a pipe open does not block the call.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    collected: dict[int, bytearray] = {
        process.stdout.fileno(): bytearray(),
        process.stderr.fileno(): bytearray(),
    }
    unfinished = set(collected)  # a program may close its outputs before it has read its input
    cut = False
    view = memoryview(stdin)
    exited = _open_process(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for fd in collected:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            if exited >= 0:
                selector.register(exited, selectors.EVENT_READ)
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
                unfinished.add(process.stdin.fileno())
            ended = False
            while unfinished and not (ended and not selector.select(0)):
                ready = selector.select(None if exited >= 0 else _POLL_S)
                ended = ended or (exited < 0 and process.poll() is not None)
                for key, _ in ready:
                    if key.fd == exited:
                        ended = True
                        selector.unregister(exited)
                    elif process.stdin is not None and key.fileobj is process.stdin:
                        view = _feed(selector, process.stdin, view)
                        if not view:
                            unfinished.discard(key.fd)
                    else:
                        data = _read(key.fd)
                        if data == b"":
                            selector.unregister(key.fd)
                            unfinished.discard(key.fd)
                        elif data is not None:
                            room = OUTPUT_LIMIT_BYTES - len(collected[key.fd])
                            cut = cut or len(data) > room
                            collected[key.fd] += data[:room]
    finally:
        if exited >= 0:
            os.close(exited)
    out, err = collected.values()
    return bytes(out), bytes(err), cut


def _open_process(pid: int) -> int:
    """Return a descriptor that is readable once a process has ended; -1 if not supported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a kernel like gVisor's
        return -1


def _feed(selector: selectors.BaseSelector, pipe: Any, view: memoryview) -> memoryview:
    try:
        view = view[os.write(pipe.fileno(), view[:65536]) :]
    except BrokenPipeError:
        view = view[:0]
    except BlockingIOError:
        return view
    if not view:
        selector.unregister(pipe)
        pipe.close()
    return view


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, 262_144)
    except BlockingIOError:
        return None


def read_file(path: str, offset: int = 0, length: int | None = None) -> dict[str, Any]:
    """Read a file or a part of it.

    Args:
        path: Relative to the work directory, or absolute.
        offset: First byte.
        length: Largest number of bytes. None: to the end.

    Returns:
        ``data`` (base64), ``size_bytes`` of the whole file.
    """
    if offset < 0 or (length is not None and length < 0):
        raise Fault("tool_input_invalid", "offset and length must not be negative")
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            _refuse_own_process(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Fault("file_access_error", f"{path!r} is not a regular file")
            wanted = status.st_size - offset if length is None else length
            if min(wanted, status.st_size - offset) > READ_LIMIT_BYTES:
                raise Fault(
                    "file_access_error",
                    f"{path!r}: {wanted} bytes exceed the limit of {READ_LIMIT_BYTES} per call",
                    "read it in parts, with offset and length",
                )
            file.seek(offset)
            data = file.read(max(0, wanted))
    except (OSError, ValueError) as exc:
        raise _file_fault(path, exc) from exc
    return {"data": base64.b64encode(data).decode(), "size_bytes": status.st_size}


def write_file(
    path: str, data: str, append: bool = False, mode: int | None = None
) -> dict[str, Any]:
    """Write a file and create its directories; the file is replaced unless `append`.

    Args:
        path: Relative to the work directory, or absolute.
        data: Content, as base64.
        append: Add to the end of the file.
        mode: Permission bits, up to 7777 octal. None: those of the file, or by the umask.
    """
    if mode is not None and not 0 <= mode <= MAX_MODE:
        raise Fault("tool_input_invalid", f"mode {mode:o} is not from 0 to {MAX_MODE:o}")
    payload = decode(data)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if append:
            with target.open("ab") as file:
                _refuse_own_process(file.fileno())
                file.write(payload)
        else:
            _replace(target, payload)
        if mode is not None:
            target.chmod(mode)
        size = target.stat().st_size
    except (OSError, ValueError) as exc:
        raise _file_fault(path, exc) from exc
    return {"size_bytes": size}


def _refuse_own_process(fd: int) -> None:
    """Refuse files and directories in /proc that tell about this process, which has the graders.

    A command of the caller cannot read them either, because this process is not dumpable.

    Raises:
        PermissionError: `fd` is one of them, whatever path it was opened by.
    """
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith("/proc/"):
            # Each thread has a directory there as well, which is not listed.
            thread = name.split("/")[2]
            if os.path.exists(f"/proc/self/task/{thread}"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


def _replace(target: Path, payload: bytes) -> None:
    """Write a temporary file and rename it, so that a full disk leaves the old content."""
    if target.exists() and not target.is_file():
        raise IsADirectoryError(21, "Is a directory", str(target))
    real = target.resolve()  # replace the target of a symbolic link, not the link
    partial = real.with_name(f".{real.name[:200]}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        partial.write_bytes(payload)
        if real.exists():
            partial.chmod(stat.S_IMODE(real.stat().st_mode))
        partial.replace(real)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def list_files(path: str = ".") -> dict[str, Any]:
    """List a directory, by name.

    Returns:
        ``entries``: ``name, type, size_bytes, modified_at`` each.
    """
    entries: list[dict[str, Any]] = []
    try:
        with _opened_directory(path) as fd, os.scandir(fd) as scan:
            for entry in scan:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                entries.append(
                    {
                        "name": entry.name.encode(errors="surrogateescape").decode(
                            errors="replace"
                        ),
                        "type": _kind(status.st_mode),
                        "size_bytes": status.st_size,
                        "modified_at": status.st_mtime,
                    }
                )
    except (OSError, ValueError) as exc:
        raise _file_fault(path, exc) from exc
    return {"entries": sorted(entries, key=lambda entry: str(entry["name"]))}


@contextlib.contextmanager
def _opened_directory(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_own_process(fd)
        yield fd
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "other"


def decode(data: str) -> bytes:
    """Return base64 data of a caller as bytes.

    Raises:
        Fault: ``tool_input_invalid``: it is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as exc:
        raise Fault("tool_input_invalid", f"data is not base64: {exc}") from exc


def _file_fault(path: str, exc: Exception) -> Fault:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return Fault("file_access_error", f"{path!r}: {reason}")


METHODS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "aenv/exec": exec_command,
    "aenv/read_file": read_file,
    "aenv/write_file": write_file,
    "aenv/list_files": list_files,
}
"""Fast-door methods served by this module."""

# Writing to a closed pipe must raise an error, not end the runtime.
if hasattr(signal, "SIGPIPE") and signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
