"""The loss of the head is said once, and so is its return."""

from __future__ import annotations

import socket
import threading

import pytest

from aenv_ray.actors.ray_shell import head_watch
from aenv_ray.actors.ray_shell.head_watch import MISSES, HeadContact


def test_a_loss_is_one_line_and_the_return_another() -> None:
    contact = HeadContact("head:6380")
    lines = [contact.note(is_up=up, now=float(n)) for n, up in enumerate([True] + [False] * 40)]
    lines.append(contact.note(is_up=True, now=41.0))
    lines += [contact.note(is_up=True, now=42.0)]
    said = [line for line in lines if line]
    assert len(said) == 2
    assert "head:6380 does not answer" in said[0]
    assert said[1].endswith("back after 40 s")
    assert not contact.is_lost


def test_a_single_miss_is_no_loss() -> None:
    contact = HeadContact("head:6380")
    for n in range(20):
        assert contact.note(is_up=n % MISSES == 0, now=float(n)) is None
        assert not contact.is_lost


def test_a_head_that_is_replaced_quickly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed look suffices to ask whether this process's node is still alive."""
    monkeypatch.setattr(head_watch, "LOOK_S", 0.05)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    cut_off = threading.Event()
    watch = head_watch.HeadWatch(f"127.0.0.1:{address[1]}", lambda: False, cut_off.set)
    try:
        while not watch.is_missed:
            threading.Event().wait(0.01)
        with socket.create_server(address):
            assert cut_off.wait(60)
    finally:
        watch.stop()
