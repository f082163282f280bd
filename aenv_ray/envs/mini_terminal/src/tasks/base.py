"""The parts of a task, and the functions with which its check examines the agent's files."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FILE_LIMIT_BYTES: Final = 4 * 1024 * 1024
RUN_LIMIT_BYTES: Final = 1024 * 1024
RUN_TIMEOUT_S: Final = 10.0

_RESOURCE_ERRORS: Final = {
    errno.EAGAIN,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
}


class Failed(Exception):
    """The task is not solved; the message says what is wrong."""


@dataclass(frozen=True)
class Task:
    """One task; its instruction and its solutions are in ``tasks.jsonl``."""

    setup: Callable[[Path], None]
    """Creates the task's files in an empty directory, the same ones each time."""
    check: Callable[[Path], None]
    """Raises `Failed` unless the directory is as the instruction asks."""
    is_about_running: bool = False
    """Whether it asks for processes that still run when it is checked."""


@dataclass(frozen=True)
class Run:
    """The outcome of a program that a check ran."""

    returncode: int
    stdout: str
    stderr: str


def as_outcome(exc: OSError, what: str) -> Failed:
    """Return `exc` as a failure of the task.

    Raises:
        OSError: `exc` itself, if it means that the machine is out of a resource: no outcome.
    """
    if exc.errno in _RESOURCE_ERRORS:
        raise exc
    return Failed(f"{what}: {exc.strerror}")


def rng(seed: str) -> random.Random:
    """Return a random generator that gives setup and check the same data."""
    return random.Random(seed)


def expect(is_met: bool, reason: str) -> None:
    """Raise `Failed` with `reason` unless `is_met`."""
    if not is_met:
        raise Failed(reason)


def put(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file with a mode, and create its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def read_bytes(path: Path) -> bytes:
    """Return what the agent wrote to `path`.

    Raises:
        Failed: It is missing, is not a regular file, or exceeds `FILE_LIMIT_BYTES`.
    """
    try:
        # A named pipe instead of the file must not block the check.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise as_outcome(exc, f"{path.name} cannot be read") from None
    with open(descriptor, "rb") as file:
        expect(stat.S_ISREG(os.fstat(descriptor).st_mode), f"{path.name} is not a regular file")
        data = file.read(FILE_LIMIT_BYTES + 1)
    expect(len(data) <= FILE_LIMIT_BYTES, f"{path.name} is over {FILE_LIMIT_BYTES} bytes")
    return data


def read_text(path: Path) -> str:
    """Return what the agent wrote to `path` as text.

    Raises:
        Failed: As `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise Failed(f"{path.name} is not UTF-8") from None


def expect_lines(path: Path, lines: Sequence[str]) -> None:
    """Expect these lines in a file, with or without a final newline."""
    found = read_text(path).removesuffix("\n").split("\n")
    expected = list(lines) or [""]
    for number, (is_, should) in enumerate(zip(found, expected, strict=False), 1):
        expect(is_ == should, f"{path.name}:{number} is {is_[:200]!r}, not {should[:200]!r}")
    expect(
        len(found) == len(expected),
        f"{path.name} has {len(found)} lines, not {len(expected)}",
    )


def run(
    arguments: Sequence[str | Path], cwd: Path, stdin: str = "", timeout_s: float = RUN_TIMEOUT_S
) -> Run:
    """Run a program of the agent in a clean environment, outside its shell.

    Raises:
        Failed: It cannot be started, exceeds `timeout_s`, or writes more than `RUN_LIMIT_BYTES`.
    """
    name = Path(arguments[0]).name
    directories = [os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {"PATH": ":".join(directories), "HOME": str(cwd), "LANG": "C.UTF-8"}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(
                list(map(str, arguments)),
                cwd=cwd,
                env=environment,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as exc:
            raise as_outcome(exc, f"{name} cannot be run") from None
        overran = threading.Event()

        def stop() -> None:
            overran.set()
            _kill_group(process.pid)

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as pipe:
                stdout = pipe.read(RUN_LIMIT_BYTES + 1)
                if len(stdout) > RUN_LIMIT_BYTES:
                    _kill_group(process.pid)
            process.wait()
        finally:
            timer.cancel()
            _kill_group(process.pid)
        expect(not overran.is_set(), f"{name} ran over {timeout_s:g} s")
        expect(len(stdout) <= RUN_LIMIT_BYTES, f"{name} wrote over {RUN_LIMIT_BYTES} bytes")
        errors.seek(0)
        stderr = errors.read(RUN_LIMIT_BYTES)
    return Run(
        process.returncode, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
    )


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def expect_run(
    arguments: Sequence[str | Path], cwd: Path, stdout: str, code: int = 0, stdin: str = ""
) -> Run:
    """Run a program and expect its exit code and, except for trailing space, its output."""
    outcome = run(arguments, cwd, stdin)
    shown = " ".join([Path(arguments[0]).name, *(repr(str(a)) for a in arguments[1:])])
    expect(
        outcome.returncode == code,
        f"{shown} exits with {outcome.returncode}, not {code}: {outcome.stderr[-300:]}",
    )
    expect(
        outcome.stdout.rstrip() == stdout.rstrip(),
        f"{shown} prints {outcome.stdout[:200]!r}, not {stdout[:200]!r}",
    )
    return outcome


def expect_executable(path: Path) -> None:
    """Expect an executable file."""
    expect(path.is_file(), f"{path.name} is missing")
    expect(bool(path.stat().st_mode & stat.S_IXUSR), f"{path.name} is not executable")


def files_in(root: Path) -> dict[str, bytes]:
    """Return path and content of every regular file below `root`, without symbolic links.

    Raises:
        Failed: The directory does not exist.
    """
    expect(root.is_dir(), f"{root.name} is not a directory")
    return {
        str(path.relative_to(root)): read_bytes(path)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def expect_files(root: Path, expected: dict[str, bytes]) -> None:
    """Expect exactly these files below `root`, with these contents."""
    found = files_in(root)
    for name in sorted(expected.keys() - found.keys()):
        raise Failed(f"{root.name}/{name} is missing")
    for name in sorted(found.keys() - expected.keys()):
        raise Failed(f"{root.name}/{name} should not be there")
    for name, content in expected.items():
        expect(found[name] == content, f"{root.name}/{name} has the wrong content")
