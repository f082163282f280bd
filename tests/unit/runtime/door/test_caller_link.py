"""What a tool tells and asks a caller over the fast door, and which resources sessions follow."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.caller_link import NOTE
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import Connection
from aenv_ray.runtime.door.subscriptions import (
    MAX_SUBSCRIPTIONS,
    Subscriptions,
    resource_updated,
)
from aenv_ray.runtime.faults import Fault

WAIT_S = 10.0
SCHEMA = {"type": "object", "properties": {}}


def ask(message: str) -> str:
    current_call().log("info", f"asking {message}", {"n": 1})
    answer = current_call().elicit(message, SCHEMA)
    return f"{answer.action} {dict(answer.content)}"


def sample(prompt: str) -> str:
    return current_call().sample(prompt).text


def change(uri: str) -> str:
    resource_updated(uri)
    return "changed"


class Bench:
    """A connection to an environment with tools that ask."""

    def __init__(self) -> None:
        registry = Registry()
        for tool in (ask, sample, change):
            registry.add_tool(tool)
        registry.add_resource(lambda day: day, "note://{day}", name="note")
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        self.lines = self.sock.makefile("rb")
        Connection(theirs, Dispatcher(registry)).start()
        self.number = 0

    def send(self, method: str, params: dict[str, Any], **meta: Any) -> int:
        self.number += 1
        meta = {"aenv/call_id": f"call-{self.number}", **meta}
        message = {"method": method, "params": {**params, "_meta": meta}}
        line = json.dumps({"jsonrpc": "2.0", "id": self.number, **message})
        self.sock.sendall(line.encode() + b"\n")
        return self.number

    def call(self, tool: str, *, offers: Any = None, session: str = "", **arguments: Any) -> int:
        meta = {} if offers is None else {"progressToken": tool, "aenv/caller": offers}
        if session:
            meta["aenv/session"] = session
        return self.send("tools/call", {"name": tool, "arguments": arguments}, **meta)

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.lines.readline())
        return found

    def note(self) -> dict[str, Any]:
        message = self.read()
        assert message["method"] == NOTE
        note: dict[str, Any] = message["params"]["note"]
        return note

    def answer(self, question: str, **answer: Any) -> None:
        number = self.send("aenv/answer", {"arguments": {"question": question, "answer": answer}})
        self.answers = number


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.sock.close()


def results(bench: Bench, count: int) -> dict[int, Any]:
    found = {}
    for _ in range(count):
        message = bench.read()
        found[message["id"]] = message.get("result") or message.get("error")
    return found


def test_a_tool_logs_asks_and_gets_the_answer(bench: Bench) -> None:
    number = bench.call("ask", offers=["logging", "elicitation"], message="Go?")
    logged = bench.note()
    assert logged["method"] == "notifications/message"
    assert logged["params"]["data"] == {"msg": "asking Go?", "extra": {"n": 1}}
    asked = bench.note()
    assert (asked["method"], asked["params"]["message"]) == ("elicitation/create", "Go?")
    bench.answer(asked["question"], result={"action": "accept", "content": {"a": 1}})
    found = results(bench, 2)
    assert found[number]["content"][0]["text"] == "accept {'a': 1}"
    assert found[bench.answers]["data"] == {"accepted": True}
    bench.answer(asked["question"], result={"action": "decline"})
    assert results(bench, 1)[bench.answers]["data"] == {"accepted": False}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": {"message": "nobody is here"}}, "refused sampling/createMessage: nobody is"),
        ({"result": {"content": "text"}}, "is malformed"),
    ],
)
def test_a_refusal_is_an_error_of_the_tool(
    bench: Bench, answer: dict[str, Any], words: str
) -> None:
    number = bench.call("sample", offers=["sampling"], prompt="Say.")
    bench.answer(bench.note()["question"], **answer)
    assert words in str(results(bench, 2)[number])


def test_an_answer_without_a_result_is_refused_and_the_tool_still_waits(bench: Bench) -> None:
    number = bench.call("sample", offers=["sampling"], prompt="Say.")
    question = bench.note()["question"]
    bench.answer(question)
    assert "needs an object as its `result` or `error`" in str(results(bench, 1)[bench.answers])
    content = {"type": "text", "text": "said"}
    bench.answer(question, result={"content": content, "model": "m"})
    assert results(bench, 2)[number]["content"][0]["text"] == "said"


@pytest.mark.parametrize("offers", [None, [], ["logging"], "sampling", [1, None]])
def test_what_a_caller_does_not_offer_is_not_asked(bench: Bench, offers: Any) -> None:
    bench.call("sample", offers=offers, prompt="Say.")
    error = bench.read()["error"]
    assert error["data"]["code"] == "caller_unsupported"


def test_a_stopped_call_withdraws_its_question(bench: Bench) -> None:
    """Invariant 11: the thread is free, and the caller need not answer."""
    number = bench.call("ask", offers=["elicitation"], message="Go?")
    asked = bench.note()
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}
    bench.sock.sendall(json.dumps(note).encode() + b"\n")
    seen = [bench.read(), bench.read()]
    assert {"method": "notifications/cancelled", "params": {}, "question": asked["question"]} in [
        message.get("params", {}).get("note") for message in seen
    ]
    assert "was cancelled" in str([message.get("error") for message in seen])


def test_a_session_is_told_of_updates_with_its_calls(bench: Bench) -> None:
    bench.send("resources/subscribe", {"uri": "note://monday"}, **{"aenv/session": "s1"})
    assert bench.read()["result"] == {}
    number = bench.call("change", offers=["logging"], session="s1", uri="note://monday")
    updated = {"method": "notifications/resources/updated", "params": {"uri": "note://monday"}}
    assert bench.note() == updated
    assert bench.read()["id"] == number
    bench.call("change", uri="note://monday")  # another caller's, without a session
    bench.call("change", uri="note://tuesday")
    results(bench, 2)
    number = bench.call("change", offers=["logging"], session="s1", uri="note://friday")
    assert bench.note() == updated
    assert bench.read()["id"] == number
    bench.send("resources/unsubscribe", {"uri": "note://monday"}, **{"aenv/session": "s1"})
    assert bench.read()["result"] == {}
    number = bench.call("change", offers=["logging"], session="s1", uri="note://monday")
    assert bench.read()["id"] == number


def test_a_subscription_needs_a_resource_and_a_session(bench: Bench) -> None:
    bench.send("resources/subscribe", {"uri": "none://x"}, **{"aenv/session": "s2"})
    assert bench.read()["error"]["data"]["code"] == "tool_not_found"
    bench.send("resources/subscribe", {"uri": "note://monday"})
    assert bench.read()["error"]["data"]["code"] == "caller_unsupported"


def test_subscriptions_are_limited_and_those_of_silent_sessions_make_room() -> None:
    """Gateways do not tell when a session has ended."""
    subscriptions = Subscriptions()
    stop = subscriptions.listen("listening", lambda _: None)
    for number in range(MAX_SUBSCRIPTIONS - 1):
        subscriptions.subscribe("listening", f"note://{number}")
    subscriptions.subscribe("old", "note://x")
    subscriptions.subscribe("new", "note://x")  # in place of the old one
    told: list[str] = []
    subscriptions.listen("old", told.append)
    subscriptions.updated("note://x")
    assert told == []
    with pytest.raises(Fault, match="1000 subscriptions"):
        subscriptions.subscribe("new", "note://y")
    stop()
    subscriptions.end("listening")
    subscriptions.subscribe("new", "note://y")


def test_updates_from_many_threads_are_all_told() -> None:
    subscriptions, told = Subscriptions(), []
    for number in range(8):
        subscriptions.subscribe("s", f"note://{number}")
    subscriptions.listen("s", told.append)
    threads = [
        threading.Thread(target=subscriptions.updated, args=(f"note://{number}",))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [f"note://{number}" for number in range(8)]
