"""Requests of a runtime to its host: one answer each, repeated when the host is replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host import requests
from aenv_ray.runtime.door.host.link import ENVIRONMENT_METHOD, SIDECAR_METHOD, HostLink
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


class Answering(Host):
    """A host that answers each request at once, or never."""

    def __init__(self, link: HostLink, answer: dict[str, Any] | None) -> None:
        super().__init__()
        self._link = link
        self._answer = answer

    def send(self, line: bytes) -> None:
        super().send(line)
        if self._answer is not None and "id" in self.got[-1]:
            self._link.on_answer({"id": self.got[-1]["id"], **self._answer})


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> HostLink:
    found = HostLink()
    monkeypatch.setattr(requests, "HOST", found)
    return found


LOST = {"error": {"message": "it ended", "data": {"code": "sandbox_lost", "hint": "another"}}}


@pytest.mark.parametrize(
    ("method", "where", "asked"),
    [
        (SIDECAR_METHOD, "the sidecar", {"method": "aenv/end_processes"}),
        (ENVIRONMENT_METHOD, "inner instances", {"method": "aenv/end_processes", "key": ""}),
    ],
)
def test_a_reward_does_not_run_beside_what_could_not_be_ended(
    link: HostLink, method: str, where: str, asked: dict[str, str]
) -> None:
    """Invariant 14; without tools, or without such processes, the host is not asked."""
    host = Answering(link, LOST)
    link.attach(host)
    link.agent_has_acted = True
    requests.end_processes_elsewhere(60.0, current_call(), 1, 60.0)
    assert host.got == []
    link.ask(link.new_id(), method, {}, lambda _: None)
    with pytest.raises(Fault, match=f"in {where} were not ended: it ended") as raised:
        requests.end_processes_elsewhere(60.0, current_call(), 1, 60.0)
    assert (raised.value.code, raised.value.hint) == ("sandbox_lost", "another")
    assert host.got[-1]["params"].items() >= asked.items()
    link.agent_has_acted = False
    requests.end_processes_elsewhere(60.0, current_call(), 1, 60.0)
    assert len(host.got) == 2


def test_inner_instances_are_told_that_a_reward_has_ended_and_nobody_waits(link: HostLink) -> None:
    host = Answering(link, None)
    link.attach(host)
    link.ask(link.new_id(), ENVIRONMENT_METHOD, {}, lambda _: None)
    requests.tell_of_end(1)
    assert len(host.got) == 1, "the agent has not acted, so they were not told that it began"
    link.agent_has_acted = True
    requests.tell_of_end(1)
    asked = host.got[-1]["params"]
    assert (asked["method"], asked["rewards"]) == ("aenv/after_reward", 1)


def test_ending_processes_has_the_time_of_the_reward(link: HostLink) -> None:
    """Invariant 9: a sidecar that does not answer takes no time beyond the call's own."""
    host = Answering(link, None)
    link.attach(host)
    link.agent_has_acted = True
    link.ask(link.new_id(), SIDECAR_METHOD, {}, lambda _: None)
    with pytest.raises(Fault, match="no answer within") as raised:
        requests.end_processes_elsewhere(0.01, current_call(), 1, 60.0)
    assert raised.value.code == "call_outcome_unknown"
    _, asked, cancelled = host.got
    assert asked["params"]["params"]["_meta"]["aenv/timeout_s"] <= 0.01
    assert cancelled["method"] == "notifications/cancelled"
