"""What writes the files of a pod's containers: for this pod only, and with an answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.kubernetes import bootstrap, unpacker
from aenv_ray.engines.kubernetes.boot import pack

ADDRESS = f"127.{1 + os.getpid() % 250}.71.9"
PORT = 8071


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    """Yield an unpacker for one container."""
    command = [sys.executable, unpacker.__file__, str(PORT), "1"]
    process = subprocess.Popen(command, env={"AENV_POD_IP": ADDRESS}, stderr=subprocess.PIPE)
    with process:
        yield process
        process.kill()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "given"
    (directory / "src").mkdir(parents=True)
    (directory / "src" / "tools.py").write_text("TOOLS = 1\n")
    (directory / "link").symlink_to("src/tools.py")
    return directory


def order_of(target: Path, *, hides: bool = False) -> dict[str, str]:
    return {"target": str(target), "hidden": str(target / "project") if hides else ""}


def archive_of(directory: Path) -> bytes:
    """Return an archive as a host sends it: several, one after the other."""
    return pack([(directory, "/.aenv/runtime")]) + pack([(directory, "/project")])


def test_files_are_written_and_it_ends(
    running: subprocess.Popen[bytes], project: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    bootstrap.unpack(order_of(target), archive_of(project), (ADDRESS, PORT)).close()
    assert running.wait(60) == 0
    for name in ("project/src/tools.py", ".aenv/runtime/src/tools.py", "project/link"):
        assert (target / name).read_text() == "TOOLS = 1\n"


def test_sources_are_removed_when_they_are_loaded(
    running: subprocess.Popen[bytes], project: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    order = order_of(target, hides=True)
    with bootstrap.unpack(order, archive_of(project), (ADDRESS, PORT)) as sock:
        assert (target / "project/src/tools.py").exists()
        sock.sendall(b"hide\n")
        assert sock.recv(100) == b'{"ok": true}\n'
        assert list((target / "project").iterdir()) == []
        assert (target / ".aenv/runtime/src/tools.py").exists()
    assert running.wait(60) == 0


def test_another_pod_is_not_heard(
    running: subprocess.Popen[bytes], project: Path, tmp_path: Path
) -> None:
    """Invariant 7: the address is reachable where no NetworkPolicy closes it."""
    target = tmp_path / "target"
    for _ in range(2):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        while sock.connect_ex((ADDRESS, PORT)):
            assert running.poll() is None
        with sock:
            sock.settimeout(10)
            assert sock.recv(1) == b""
    bootstrap.unpack(order_of(target), archive_of(project), (ADDRESS, PORT)).close()
    assert running.wait(60) == 0


def test_a_container_learns_why_its_files_are_not_there(
    running: subprocess.Popen[bytes], project: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("a file where a directory is to be")
    with pytest.raises(OSError, match=r"Error: .*target"):
        bootstrap.unpack(order_of(target), archive_of(project), (ADDRESS, PORT))
    assert running.wait(60) == 1
    assert running.stderr is not None
    assert b"Traceback" in running.stderr.read()
