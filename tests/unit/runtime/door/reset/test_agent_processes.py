"""Processes of an agent: what is stopped before a reward goes on if it is the environment's."""

from __future__ import annotations

import signal
from typing import NoReturn

import pytest

from aenv_ray.runtime.door.calls import CallInterrupted
from aenv_ray.runtime.door.reset import agent_processes
from aenv_ray.runtime.door.reset.agent_processes import AgentProcesses


def test_a_deadline_leaves_no_process_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the environment would answer no call any more."""
    sent: list[tuple[int, int]] = []

    def interrupted(_: object) -> NoReturn:
        raise CallInterrupted

    # Not for real: all processes of this machine would be stopped.
    monkeypatch.setattr(agent_processes, "_signal", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(agent_processes, "_has_children", lambda: True)
    processes = AgentProcesses(owns_namespace=True)
    processes.expect()
    monkeypatch.setattr(agent_processes, "_all_but", interrupted)
    with pytest.raises(CallInterrupted):
        processes.end()
    processes.give_room()
    assert sent == [(-1, signal.SIGSTOP), (-1, signal.SIGCONT)]
