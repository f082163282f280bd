"""Ports for what listens later: nobody else is given them meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.local import free_ports
from aenv_ray.cli.local.free_ports import FIRST_PORT, free_port


def given_from(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text)
    monkeypatch.setattr(free_ports, "_EPHEMERAL_RANGE", path)


def test_it_is_one_that_the_kernel_gives_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_from(tmp_path / "range", f"{FIRST_PORT + 100}\t60999\n", monkeypatch)
    for host in ("127.0.0.1", "", "::1"):
        assert FIRST_PORT <= free_port(host) < FIRST_PORT + 100


def test_one_that_is_taken_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]

        def sample(ports: Any, k: int) -> list[int]:
            return [port, port]

        monkeypatch.setattr(random, "sample", sample)
        assert free_port() != port


@pytest.mark.parametrize("text", ["1024\t65535\n", f"{FIRST_PORT} 60999", "", "many"])
def test_where_the_kernel_gives_all_any_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    given_from(tmp_path / "range", text, monkeypatch)
    assert 1024 <= free_port() <= 65535


def test_an_address_of_another_machine_has_none() -> None:
    with pytest.raises(OSError, match=r"[Cc]annot assign"):
        free_port("192.0.2.1")
