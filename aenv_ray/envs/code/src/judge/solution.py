"""The process of a solution: runs it, and answers the judge's requests."""

from __future__ import annotations

import builtins
import fcntl
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

from judge import plain

REQUESTS = 3
REPLIES = 4
"""Descriptors of this process."""
_FILE_BYTES = 64 * 1024 * 1024
_LAST_DESCRIPTOR = 4096
_COPIES_FROM = 64
_MODULE = "solution"


def run(job: dict[str, Any], pipes: dict[str, int]) -> None:
    """Run the code of a job in this process, a new fork of the starter. Does not return.

    Args:
        job: ``source``, ``path`` of a new directory, ``is_program``, ``cpu_s``, ``memory_bytes``.
        pipes: Descriptors of ``requests``, ``replies``, ``input`` and ``errors``.
    """
    code = 1
    try:
        _become_isolated(job, pipes)
        if job["is_program"]:
            _run_program(job["source"])
        else:
            _serve(job["source"])
        code = 0
    except SystemExit:
        code = 0  # a program may end itself; what it printed counts
    except MemoryError:
        code = MEMORY_EXIT
    except BaseException:  # noqa: BLE001  # the solution may raise anything
        _print_exception()
    finally:
        _flush()
        os._exit(code)


MEMORY_EXIT = 77
"""Exit code of a solution that has run out of memory."""


def _become_isolated(job: dict[str, Any], pipes: dict[str, int]) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    is_program = job["is_program"]
    wanted = (
        pipes["input"] if is_program else nothing,
        pipes["replies"] if is_program else nothing,
        pipes["errors"],
        nothing if is_program else pipes["requests"],
        nothing if is_program else pipes["replies"],
    )
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, _COPIES_FROM) for fd in wanted]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(len(copies), _LAST_DESCRIPTOR)
    os.lseek(0, 0, os.SEEK_SET)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"})
    try:
        os.mkdir(job["path"], 0o700)
        os.chdir(job["path"])
    except OSError:  # the agent has filled the disk
        os.chdir("/")
    # Of the module site, which the judge does without.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES, _FILE_BYTES)
    _limit(resource.RLIMIT_DATA, job["memory_bytes"], job["memory_bytes"])
    _limit(resource.RLIMIT_CPU, job["cpu_s"], job["cpu_s"] + 1)


def _limit(kind: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _run_program(source: str) -> None:
    _load(source, _new_module("__main__"))


def _new_module(name: str) -> dict[str, Any]:
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def _serve(source: str) -> None:
    """Run the code, then answer requests until the judge ends this process."""
    objects: list[Any] = []

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    namespace = _new_module(_MODULE)
    # The first reply says whether the code could be loaded.
    loaded = _outcome(_load, source, namespace)
    _reply(plain.encode((*loaded, ()) if loaded[0] == "ok" else loaded, number_of))
    operations = {**_OPERATIONS, "name": lambda name: namespace[name]}
    while True:
        operation, arguments, options = plain.decode(_request(), objects.__getitem__)
        before = _changeable(arguments, number_of)
        outcome = _outcome(operations[operation], *arguments, **options)
        if outcome[0] == "ok":
            changed = tuple(
                (index, arguments[index])
                for index, data in before.items()
                if plain.encode(arguments[index], number_of) != data
            )
            outcome = (*outcome, changed)
        try:
            data = plain.encode(outcome, number_of)
        except RecursionError as exc:
            data = plain.encode(_raised(exc), number_of)
        _reply(data)


def _load(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "solution.py", "exec"), namespace)


def _call(function: Any, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "contains": lambda value, item: item in value,
    "get": getattr,
    "item": lambda value, key: value[key],
    "iterate": iter,
    "length": len,
    "next": next,
    "set": setattr,
    "text": str,
    "truth": bool,
}


def _changeable(arguments: tuple[Any, ...], number_of: Callable[[Any], int]) -> dict[int, bytes]:
    """Return the arguments that a call may change in place, as they are before it."""
    return {
        index: plain.encode(value, number_of)
        for index, value in enumerate(arguments)
        if isinstance(value, list | dict | set | bytearray)
    }


def _outcome(run: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    try:
        return ("ok", run(*arguments, **options))
    except BaseException as exc:  # noqa: BLE001  # the solution may raise anything
        return _raised(exc)


def _raised(exc: BaseException) -> tuple[Any, ...]:
    try:
        text = str(exc)[:500]
    except Exception:  # noqa: BLE001  # its own __str__ failed
        text = ""
    return ("raised", type(exc).__name__, text)


def _request() -> bytes:
    return _read_exactly(struct.unpack("Q", _read_exactly(8))[0])


def _read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(REQUESTS, min(size, 1 << 20))
        if not part:
            os._exit(0)  # the judge has ended
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _reply(data: bytes) -> None:
    view = memoryview(struct.pack("Q", len(data)) + data)
    while view:
        view = view[os.write(REPLIES, view) :]


def _print_exception() -> None:
    import traceback

    kind, value, trace = sys.exc_info()
    own = trace.tb_next.tb_next if trace is not None and trace.tb_next is not None else None
    traceback.print_exception(kind, value, own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  # the solution may have closed or replaced it
            continue
