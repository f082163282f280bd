"""Connections to ports inside a sandbox."""

from __future__ import annotations

import base64
import socket

import pytest

from aenv_ray.runtime.door.ports import Ports
from aenv_ray.runtime.faults import Fault


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_server_on_either_loopback_address_is_reached(family: socket.AddressFamily) -> None:
    """Programs that listen on "localhost" take the one or the other."""
    address = "127.0.0.1" if family is socket.AF_INET else "::1"
    ports = Ports()
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError as exc:
            pytest.skip(f"this machine has no {address}: {exc}")
        server.listen()
        name = ports.open(server.getsockname()[1])["connection"]
        client, _ = server.accept()
        with client:
            client.sendall(b"welcome")
            assert base64.b64decode(ports.read(name)["data"]) == b"welcome"
            assert ports.close(name) == {"closed": True}
            assert client.recv(1) == b""


def test_the_error_of_an_unused_port_names_127_0_0_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        with pytest.raises(Fault, match=rf"answers on port {port}: .*refused"):
            Ports().open(port)


def test_an_invalid_port_is_refused() -> None:
    with pytest.raises(Fault, match="answers on port 70000"):
        Ports().open(70_000)
