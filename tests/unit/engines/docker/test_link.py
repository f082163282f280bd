"""Links to containers with their own kernel: runtimes, frames, key."""

from __future__ import annotations

import _thread
import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines import door
from aenv_ray.engines.docker.link import SocketLink, Stream, has_own_kernel
from aenv_ray.engines.node.host_key import authenticate
from aenv_ray.runtime.container import authenticated_door, bridge
from aenv_ray.runtime.container.authenticated_door import AuthenticatedDoor
from aenv_ray.runtime.container.handshake import (
    MAC_BYTES,
    MAX_PURPOSE_BYTES,
    NONCE_BYTES,
    accept_host,
    host_mac,
)
from tests.contract.engines import filled

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ({"path": "runc"}, False),
        ({"path": "/usr/bin/crun"}, False),
        ({"path": "/opt/nvidia/nvidia-container-runtime", "runtimeArgs": []}, False),
        ({"runtimeType": "io.containerd.runc.v2"}, False),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["--network=host"]}, True),
        ({"runtimeType": "io.containerd.kata.v2"}, True),
        ({"path": "/opt/unknown"}, True),
        ({}, True),
    ],
)
def test_only_known_runtimes_share_the_nodes_kernel(
    description: dict[str, Any], expected: bool
) -> None:
    """The other link works with every runtime."""
    assert has_own_kernel(description) is expected


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BxxxI", kind, len(payload)) + payload


async def test_a_stream_unpacks_frames_however_they_are_cut() -> None:
    daemon, far = socket.socketpair()
    for sock in (daemon, far):
        sock.setblocking(False)
    loop = asyncio.get_running_loop()
    whole = frame(1, b"one") + frame(2, b"a word of warning") + frame(1, b"two" * 50_000)
    stream = Stream(daemon, whole[:5])
    sending = asyncio.create_task(loop.sock_sendall(far, whole[5:]))
    got = b""
    while len(got) < 3 + 150_000:
        got += await loop.sock_recv(stream.socket, 65_536)
    await sending
    assert got == b"one" + b"two" * 50_000
    assert stream.errors == "a word of warning"
    await loop.sock_sendall(stream.socket, b"in, as it is")
    assert await loop.sock_recv(far, 100) == b"in, as it is"
    stream.socket.close()
    assert await loop.sock_recv(far, 100) == b""
    await stream.ended()
    far.close()


async def test_an_error_instead_of_frames_is_available_as_text() -> None:
    daemon, far = socket.socketpair()
    daemon.setblocking(False)
    stream = Stream(daemon, b"")
    far.sendall(b"OCI runtime exec failed\r\n")
    far.close()
    assert await asyncio.get_running_loop().sock_recv(stream.socket, 100) == b""
    await stream.ended()
    assert stream.errors == "OCI runtime exec failed"
    stream.socket.close()


@pytest.fixture
def name() -> str:
    return f"aenv-test-{uuid.uuid4().hex[:12]}"


def connect(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(bridge.address(name))
    return sock


@pytest.fixture
def bridged(name: str) -> Iterator[socket.socket]:
    """Yield a socket that a bridge, a real process, connects to the door of that name."""
    near, far = socket.socketpair()
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", bridge.__file__, name], stdin=far, stdout=far
    )
    far.close()
    yield near
    near.close()
    assert program.wait(60) == 0, "it ends with its host"


async def test_only_peers_with_the_key_are_admitted(name: str, bridged: socket.socket) -> None:
    """Invariant 8: processes in the container can connect, but have no key."""
    door = AuthenticatedDoor(name, KEY)
    door.tell({"ready": {"uid": 1}})
    bridged.setblocking(False)
    with connect(name) as stranger:
        stranger.setblocking(False)
        with pytest.raises(OSError, match=r"closed|reset"):
            await authenticate(stranger, bytes(32), {"kind": "door"})
    await authenticate(bridged, KEY, {"kind": "boot"})
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(bridged, 100) == b'{"ready": {"uid": 1}}\n'
    accepted: list[socket.socket] = []
    # What `accept` returns, without its signal handling, which needs the main thread.
    thread = threading.Thread(target=lambda: accepted.append(door._handed_over.accept()[0]))
    thread.start()
    await asyncio.to_thread(thread.join, 60)
    (inside,) = accepted
    with inside:
        await loop.sock_sendall(bridged, b"question")
        assert await asyncio.to_thread(inside.recv, 100) == b"question"
        inside.sendall(b"answer" * 50_000)
        got = b""
        while len(got) < 300_000:
            got += await loop.sock_recv(bridged, 65_536)
    assert await loop.sock_recv(bridged, 1) == b""


async def test_a_failed_start_is_reported_before_its_process_ends(
    name: str, bridged: socket.socket
) -> None:
    """Its end would end the bridge, with the report still on its way."""
    door = AuthenticatedDoor(name, KEY)
    bridged.setblocking(False)
    telling = asyncio.create_task(asyncio.to_thread(door.tell, {"failed": "no such tool"}))
    await authenticate(bridged, KEY, {"kind": "boot"})
    answer = await asyncio.get_running_loop().sock_recv(bridged, 100)
    assert answer == b'{"failed": "no such tool"}\n'
    assert not telling.done()
    bridged.shutdown(socket.SHUT_WR)
    await telling


async def test_a_door_that_accepts_nothing_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: the host serves other sandboxes in the same event loop."""
    monkeypatch.setattr(door, "FULL_S", 0.2)
    link = SocketLink(tmp_path / "boot", tmp_path / "door")
    await link.before_start("c1")
    with filled(str(tmp_path / "door")):
        connecting = asyncio.create_task(link.connect())
        with pytest.raises(BlockingIOError):
            await asyncio.wait_for(connecting, 60)
    link.close()


def test_a_bridge_does_not_wait_for_ever_for_a_door_that_accepts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take one of the processes that the container may have."""
    monkeypatch.setattr(bridge, "CONNECT_S", 0.2)
    found: list[socket.socket | None] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(bridge.address(name))
        listener.listen(1)
        with filled(bridge.address(name)):
            thread = threading.Thread(target=lambda: found.append(bridge._connect(f"\0{name}")))
            thread.start()
            thread.join(10.0)
            ended = not thread.is_alive()
        listener.close()
    thread.join()
    assert (ended, found) == (True, [None])


def test_the_key_is_read_once_from_standard_input(name: str) -> None:
    """Invariant 10: later processes find neither the key nor a way to get it."""
    script = (
        "import os, sys; from aenv_ray.runtime.container.authenticated_door import read_order; "
        "door = read_order(); "
        "print(door._key.hex(), os.read(0, 100), os.readlink('/proc/self/fd/0'))"
    )
    line = f'{{"door": "{name}", "key": "{KEY.hex()}"}}\n'
    done = subprocess.run(
        [sys.executable, "-c", script], input=line, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [KEY.hex(), "b''", os.devnull]
    none = subprocess.run(
        [sys.executable, "-c", script], input="", capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert "gave no key" in none.stderr


# --- the handshake -------------------------------------------------------------------------------


async def test_a_process_without_the_key_does_not_pass_for_the_runtime() -> None:
    """Invariant 14: a host talks to the runtime that it started, or to nothing."""
    host, impostor = socket.socketpair()
    host.setblocking(False)
    with host, impostor:
        impostor.sendall(bytes(NONCE_BYTES + MAC_BYTES))
        with pytest.raises(ConnectionRefusedError, match="does not have the instance's key"):
            await authenticate(host, KEY, {"kind": "door"})


@pytest.mark.parametrize("changed", [b'{"kind": "logs"}', bytes(MAX_PURPOSE_BYTES + 1)])
def test_the_purpose_of_a_connection_cannot_be_changed_on_the_way(changed: bytes) -> None:
    """Invariant 14: the code covers it, and its length is limited before it is read."""
    inside, outside = socket.socketpair()
    with inside, outside:
        outside.settimeout(60)
        inside.settimeout(60)
        ours, purpose = bytes(NONCE_BYTES), b'{"kind": "door"}'
        accepted: list[object] = []
        thread = threading.Thread(target=lambda: accepted.append(accept_host(inside, KEY)))
        thread.start()
        theirs = outside.recv(NONCE_BYTES, socket.MSG_WAITALL)
        mac = host_mac(KEY, theirs, ours, purpose)
        outside.sendall(ours + mac + len(changed).to_bytes(2, "big"))
        if len(changed) <= MAX_PURPOSE_BYTES:
            outside.sendall(changed)
        thread.join(60)
    assert accepted == [None]


def test_a_peer_that_says_nothing_gives_its_place_to_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: processes inside cannot keep the host from connecting."""
    monkeypatch.setattr(authenticated_door, "_HANDSHAKE_S", 0.05)
    AuthenticatedDoor(name, KEY).tell({"ready": {"uid": 1}})
    with connect(name) as silent:
        silent.settimeout(60)
        assert len(silent.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        assert silent.recv(1) == b"", "it was disconnected"


def test_a_peer_for_which_no_thread_starts_is_disconnected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host then connects again, and does not wait for an answer."""
    AuthenticatedDoor(name, KEY).tell({"ready": {"uid": 1}})

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        patch.setattr(threading, "_start_new_thread", refuse)
        with connect(name) as refused:
            refused.settimeout(10)
            assert refused.recv(1) == b""
    with connect(name) as served:
        served.settimeout(60)
        assert len(served.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES


AS_NOBODY = """
import contextlib, ctypes, os, socket, sys, threading, time  # nobody may not read them
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after the start of a program
exec({source!r})
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="runs a program as another user")
def test_other_processes_of_its_user_cannot_look_into_a_bridge(name: str) -> None:
    """Invariant 14: the rewards of an instance pass through it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(bridge.address(name))
        listener.listen()
        listener.settimeout(60)
        source = Path(bridge.__file__).read_text()
        script = AS_NOBODY.format(source=source)
        with subprocess.Popen(
            [sys.executable, "-I", "-c", script, name], stdin=subprocess.PIPE
        ) as program:
            connection, _ = listener.accept()
            assert Path(f"/proc/{program.pid}/environ").stat().st_uid == 0
            connection.close()
