"""Runs attacks as a second user of the machine, who has no privileges."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

_USER_ID = 61_235


def refusal(attack: Callable[[], object]) -> str:
    """Run an attack in a process of the other user; only root can.

    Returns:
        The name of the error that stopped it; "" if it succeeded.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = ""
        try:
            os.setgroups([])
            os.setresgid(_USER_ID, _USER_ID, _USER_ID)
            os.setresuid(_USER_ID, _USER_ID, _USER_ID)
            attack()
        except BaseException as exc:  # noqa: BLE001  # the other process reports it
            answer = type(exc).__name__
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    return answer


def open_to_others(directory: Path) -> list[Path]:
    """Return what below a directory the other user can list, read, or connect to."""
    return [path for path in (directory, *directory.rglob("*")) if not refusal(_attack(path))]


def _attack(path: Path) -> Callable[[], object]:
    if path.is_socket():
        return lambda: socket.socket(socket.AF_UNIX).connect(str(path))
    return (lambda: os.listdir(path)) if path.is_dir() else path.read_bytes
