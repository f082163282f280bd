"""Requests of a runtime to its host: one answer each, repeated when the host is replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aenv_ray.runtime.door import host_requests
from aenv_ray.runtime.door.host_link import SIDECAR_METHOD, HostLink
from aenv_ray.runtime.faults import Fault


class Host:
    """A peer that keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    def send(self, line: bytes) -> None:
        self.got += [json.loads(part) for part in line.splitlines()]


def ask(link: HostLink, answers: list[dict[str, Any]]) -> str:
    request_id = link.new_id()
    link.ask(request_id, "m", {"x": 1}, answers.append)
    return request_id


def test_an_answer_is_delivered_once() -> None:
    link, host, answers = HostLink(), Host(), []
    link.attach(host)
    request_id = ask(link, answers)
    assert host.got == [{"jsonrpc": "2.0", "method": "m", "id": request_id, "params": {"x": 1}}]
    answer = {"id": request_id, "result": {}}
    link.on_answer(answer)
    link.on_answer(answer)
    assert answers == [answer]


def test_a_request_without_an_answer_is_sent_to_the_next_host() -> None:
    link, first, second, answers = HostLink(), Host(), Host(), []
    link.attach(first)
    answered, waiting = ask(link, answers), ask(link, answers)
    link.on_answer({"id": answered, "result": {}})
    link.detach(first)
    later = ask(link, answers)
    assert [request["id"] for request in first.got] == [answered, waiting]
    link.attach(second)
    assert [request["id"] for request in second.got] == [waiting, later]


def test_detaching_a_replaced_host_keeps_its_successor() -> None:
    link, first, second = HostLink(), Host(), Host()
    link.attach(first)
    link.attach(second)
    link.detach(first)
    ask(link, [])
    assert len(second.got) == 1


def test_cancelling_notifies_the_host_and_drops_the_answer() -> None:
    link, host, answers = HostLink(), Host(), []
    link.attach(host)
    request_id = ask(link, answers)
    link.cancel(request_id)
    link.cancel(request_id)
    (note,) = host.got[1:]
    assert (note["method"], note["params"]) == (
        "notifications/cancelled",
        {"requestId": request_id},
    )
    link.on_answer({"id": request_id, "result": {}})
    assert answers == []


def test_there_is_no_host_while_code_is_loaded() -> None:
    link = HostLink()
    assert not link.was_open
    host = Host()
    link.attach(host)
    link.detach(host)
    assert link.was_open


class Refusing(Host):
    """A host whose sidecar has ended."""

    def __init__(self, link: HostLink) -> None:
        super().__init__()
        self._link = link

    def send(self, line: bytes) -> None:
        super().send(line)
        data = {"code": "sandbox_lost", "hint": "create another"}
        error = {"message": "it ended", "data": data}
        self._link.on_answer({"id": self.got[-1]["id"], "error": error})


def test_a_reward_does_not_run_beside_what_could_not_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 14; without tools, or without a sidecar, the host is not asked."""
    link = HostLink()
    monkeypatch.setattr(host_requests, "HOST", link)
    host = Refusing(link)
    link.attach(host)
    link.agent_has_acted = True
    host_requests.end_sidecar_processes()
    assert host.got == []
    ask_id = link.new_id()
    link.ask(ask_id, SIDECAR_METHOD, {}, lambda _: None)
    with pytest.raises(Fault, match="in the sidecar were not ended: it ended"):
        host_requests.end_sidecar_processes()
    assert host.got[-1]["params"]["method"] == "aenv/end_processes"
    link.agent_has_acted = False
    host_requests.end_sidecar_processes()
    assert len(host.got) == 2
