"""The fast door: calls that wait for a thread, cancellation, answers."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door import door
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import Connection
from aenv_ray.runtime.door.host.link import HOST
from aenv_ray.runtime.system import threads

WAIT_S = 10.0


class Bench:
    """A connection to an environment whose tool waits until the test lets it go."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        registry = Registry()
        registry.add_tool(self.wait, name="wait")
        self.dispatcher = Dispatcher(registry)
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(WAIT_S)
        self.lines = self.sock.makefile("rb")
        Connection(theirs, self.dispatcher).start()
        self.request_id = 0

    def wait(self, label: str) -> str:
        self.ran.append(label)
        self.began.release()
        assert self.go.wait(WAIT_S)
        return label

    def send(self, *messages: dict[str, Any]) -> None:
        self.sock.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def call(self, label: str, timeout_s: float = 60.0) -> int:
        self.request_id += 1
        meta = {"aenv/call_id": f"call-{label}", "aenv/timeout_s": timeout_s}
        params = {"name": "wait", "arguments": {"label": label}, "_meta": meta}
        self.send(
            {"jsonrpc": "2.0", "id": self.request_id, "method": "tools/call", "params": params}
        )
        return self.request_id

    def cancel(self, request_id: int) -> None:
        params = {"requestId": request_id, "reason": "the agent gave up"}
        self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

    def answer(self) -> tuple[int, Any]:
        """Return the next answer: its id, and the text or the error's code."""
        message = json.loads(self.lines.readline())
        if "error" in message:
            return message["id"], message["error"]["data"]
        return message["id"], message["result"]["content"][0]["text"]

    def list_tools(self) -> list[str]:
        """Return the names of the tools."""
        self.request_id += 1
        self.send({"jsonrpc": "2.0", "id": self.request_id, "method": "tools/list"})
        return [tool["name"] for tool in json.loads(self.lines.readline())["result"]["tools"]]

    def close(self) -> None:
        self.lines.close()
        self.sock.close()

    def answer_to(self, label: str) -> Any:
        """Make a call and return what it is answered."""
        request_id = self.call(label)
        answered, value = self.answer()
        assert answered == request_id
        return value

    def fill_threads(self) -> list[int]:
        """Have every thread busy with a call, except the one that reads."""
        ids = []
        for index in range(door.MAX_THREADS - 1):
            ids.append(self.call(f"busy-{index}"))
            assert self.began.acquire(timeout=WAIT_S)
        return ids


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(door, "MAX_THREADS", 3)
    made = Bench()
    yield made
    made.go.set()
    made.close()


def test_a_call_whose_deadline_passes_while_it_waits_never_runs(bench: Bench) -> None:
    """Invariant 9: its caller is told at the deadline, while all threads are still busy."""
    busy = bench.fill_threads()
    late = bench.call("late", timeout_s=0.05)
    answered, error = bench.answer()
    assert answered == late
    assert error["code"] == "tool_timeout"
    assert "'wait' did not run" in error["message"]
    bench.go.set()
    assert {bench.answer()[0] for _ in busy} == set(busy)
    assert bench.answer_to("after") == "after"
    assert bench.ran == ["busy-0", "busy-1", "after"]


def test_a_repetition_of_a_call_that_never_ran_gets_the_same_error(bench: Bench) -> None:
    """Invariant 1: the first outcome stays, also when there is room by now."""
    busy = bench.fill_threads()
    bench.call("late", timeout_s=0.05)
    first = bench.answer()[1]
    bench.go.set()
    for _ in busy:
        bench.answer()
    bench.call("late")
    assert bench.answer()[1] == first
    assert "late" not in bench.ran


def test_a_call_that_is_cancelled_before_it_begins_never_runs(bench: Bench) -> None:
    """Invariant 11: and its caller is told at once, while all threads are still busy."""
    busy = bench.fill_threads()
    waiting = bench.call("waiting")
    bench.cancel(waiting)
    answered, error = bench.answer()
    assert (answered, error["code"]) == (waiting, "call_cancelled")
    assert "the agent gave up" in error["message"]
    bench.go.set()
    for _ in busy:
        bench.answer()
    assert bench.answer_to("after") == "after"
    assert "waiting" not in bench.ran


def test_calls_that_wait_run_in_order_when_threads_are_free(bench: Bench) -> None:
    busy = bench.fill_threads()
    waiting = [bench.call(f"waiting-{index}") for index in range(5)]
    bench.go.set()
    assert {bench.answer()[0] for _ in (*busy, *waiting)} == {*busy, *waiting}
    assert sorted(bench.ran[2:]) == [f"waiting-{index}" for index in range(5)]


def test_a_waiting_call_is_refused_like_one_that_runs_at_once(bench: Bench) -> None:
    bench.fill_threads()
    bench.call("x", timeout_s=-1)
    assert bench.answer()[1]["code"] == "tool_input_invalid"


@pytest.mark.parametrize("every", [1, 2, 3])
def test_no_call_is_lost_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The sandbox is out of processes, or of memory for a stack: calls wait and none hangs."""
    bench = Bench()  # its first thread runs
    bench.go.set()
    asked = itertools.count(1)

    def start(target: Callable[[], object]) -> None:
        if next(asked) % every == 0:
            raise RuntimeError("can't start new thread")
        threads.start_thread(target)

    monkeypatch.setattr(door, "start_thread", start)
    monkeypatch.setattr(door, "QUICK_S", 0.0)  # every function counts as slow
    sent = {bench.call(f"call {n}"): f"call {n}" for n in range(100)}  # answers fit the buffer
    assert dict(bench.answer() for _ in sent) == sent
    assert next(asked) > 1
    bench.sock.close()


def test_one_monitor_watches_all_connections_and_outlives_its_failures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that blocks a leader does not keep calls behind it waiting, on any connection."""
    monitor = door._LeaderMonitor()
    monkeypatch.setattr(door, "_monitor", monitor)
    failed = threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: failed.set())
    started: list[Any] = []

    def start_thread(target: Any) -> None:
        is_monitor = target == monitor._run
        started.extend([target] if is_monitor else [])
        if is_monitor and len(started) == 1:
            raise RuntimeError("can't start new thread")
        threads.start_thread(target)

    monkeypatch.setattr(door, "start_thread", start_thread)
    assert bench.list_tools() == ["wait"]  # the monitor has no thread
    assert not monitor._has_thread

    class Broken:
        is_closed = False
        inline_since = 0.0

        def replace_leader(self, since: float) -> None:
            raise ValueError("a bug")

    monitor.watch(Broken())  # type: ignore[arg-type]  # what the monitor uses
    assert failed.wait(WAIT_S)
    second = Bench()
    for one in (bench, second):
        one.call("slow")  # the leader runs it, since it is the first of its kind
        assert one.began.acquire(timeout=WAIT_S)
        assert one.list_tools() == ["wait"]  # the leader was replaced
        one.go.set()
        one.close()
    assert len(started) == 3  # one failed to start, one had the bug, one serves both


def test_a_connection_without_any_thread_names_the_limit_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(door, "start_thread", start)
    ours, theirs = socket.socketpair()
    with ours:
        Connection(theirs, Dispatcher(Registry())).start()
        ours.settimeout(WAIT_S)
        with ours.makefile("rb") as lines:
            error = json.loads(lines.readline())
            assert error["id"] is None
            assert "RLIMIT_NPROC" in error["error"]["message"]
            assert lines.read() == b""


@pytest.mark.parametrize(
    "value", ["[" * 300 + "]" * 300, "9" * 5000], ids=["too deep", "too many digits"]
)
def test_arguments_that_cannot_be_parsed_fail_only_their_call(bench: Bench, value: str) -> None:
    """An agent's arguments must not end its sandbox: that would void the episode."""
    bench.go.set()
    line = (
        '{"jsonrpc":"2.0","id":77,"method":"tools/call","params":'
        f'{{"name":"wait","arguments":{{"label":{value}}}}}}}\n'
    )
    bench.sock.sendall(line.encode())
    answered, data = bench.answer()
    assert (answered, data["code"]) == (77, "tool_input_invalid")
    assert bench.answer_to("after") == "after"
    assert bench.ran == ["after"]


# --- roles ---------------------------------------------------------------------------------------


def ask(bench: Bench, request_id: int, method: str, **params: Any) -> dict[str, Any]:
    """Send a request and return its answer."""
    bench.send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
    answer: dict[str, Any] = json.loads(bench.lines.readline())
    assert answer["id"] == request_id
    return answer


def test_an_agents_connection_calls_tools_only(bench: Bench) -> None:
    """Invariant 8: also after it asked for another role, and batches stay possible."""
    bench.go.set()
    assert ask(bench, 1, "aenv/hello", role="agent")["result"] == {}
    for method in ("aenv/hello", "aenv/reward", "aenv/function", "aenv/exec", "aenv/health"):
        error = ask(bench, 2, method, role="host", arguments={"command": "true"})["error"]
        assert error["data"]["code"] == "forbidden"
    assert "tools" in ask(bench, 3, "tools/list")["result"]
    batch = ask(bench, 4, "aenv/call_tools", calls=[{"name": "wait", "arguments": {"label": "b"}}])
    assert "result" in batch["result"]["results"][0]
    assert bench.ran == ["b"]


def test_the_role_of_a_connection_is_final(bench: Bench) -> None:
    """A caller cannot become the host, whose answers the runtime believes."""
    assert ask(bench, 1, "aenv/hello", role="owner")["result"] == {}
    assert "unknown method" in ask(bench, 2, "aenv/hello", role="host")["error"]["message"]


def test_requests_of_the_runtime_go_to_the_host_only(bench: Bench) -> None:
    """Invariant 7: a caller on the node neither receives nor answers them."""
    answers: list[Any] = []
    ask(bench, 1, "aenv/hello", role="owner")
    host, theirs = socket.socketpair()
    Connection(theirs, bench.dispatcher).start()
    host.settimeout(WAIT_S)
    with host, host.makefile("rb") as lines:
        host.sendall(b'{"jsonrpc":"2.0","id":1,"method":"aenv/hello","params":{"role":"host"}}\n')
        assert b"result" in lines.readline()
        request_id = HOST.new_id()
        HOST.ask(request_id, "aenv/second", {}, answers.append)
        assert json.loads(lines.readline())["id"] == request_id
        bench.send({"jsonrpc": "2.0", "id": request_id, "result": {"forged": True}})
        ask(bench, 2, "ping")  # the forged answer was read
        assert answers == []
        HOST.cancel(request_id)


def test_an_agents_call_ids_are_apart_from_the_owners(bench: Bench) -> None:
    """Invariant 14: an agent that guesses an id neither gets nor takes the outcome."""
    bench.go.set()
    agent, theirs = socket.socketpair()
    Connection(theirs, bench.dispatcher).start()
    agent.settimeout(WAIT_S)
    with agent, agent.makefile("rb") as lines:
        agent.sendall(b'{"jsonrpc":"2.0","id":0,"method":"aenv/hello","params":{"role":"agent"}}\n')
        assert b"result" in lines.readline()
        bench.call("mine")
        assert bench.answer()[1] == "mine"
        for request_id, call_id in enumerate(("call-mine", "agent call-mine")):
            arguments = {"label": "theirs"}
            params = {"name": "wait", "arguments": arguments, "_meta": {"aenv/call_id": call_id}}
            request = {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}
            agent.sendall(json.dumps(request).encode() + b"\n")
            assert "theirs" in json.loads(lines.readline())["result"]["content"][0]["text"]
    assert bench.ran == ["mine", "theirs"]


def test_an_agent_does_not_open_the_gate_of_an_outer_reward(bench: Bench) -> None:
    """Invariant 14: only a host says that a call is not of an agent."""
    bench.go.set()
    held = {"aenv/rewards": 1, "aenv/held_s": 60.0}
    ended = threading.Event()
    bench.dispatcher.submit("aenv/end_processes", {"_meta": held}, lambda _: ended.set())
    assert ended.wait(WAIT_S)
    agent, theirs = socket.socketpair()
    Connection(theirs, bench.dispatcher).start()
    agent.settimeout(WAIT_S)
    with agent, agent.makefile("rb") as lines:
        agent.sendall(b'{"jsonrpc":"2.0","id":0,"method":"aenv/hello","params":{"role":"agent"}}\n')
        assert b"result" in lines.readline()
        for claimed in (-1, 10**9):
            params = {
                "name": "wait",
                "arguments": {"label": "x"},
                "_meta": {"aenv/rewards": claimed},
            }
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            agent.sendall(json.dumps(request).encode() + b"\n")
            assert json.loads(lines.readline())["error"]["data"]["code"] == "call_cancelled"
    assert bench.ran == []


MEETING = """
import resource, socket, threading
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.door.door import serve

resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9))
together = threading.Barrier(200)
registry = Registry()
registry.add_tool(lambda: together.wait(60.0) >= 0, name="meet")
pairs = [socket.socketpair() for _ in range(3)]
ends = [theirs for _, theirs in pairs]

def accept() -> socket.socket:
    if not ends:
        raise OSError
    return ends.pop()

serve(accept, Dispatcher(registry))
call = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"meet"}}\\n'
for number in range(200):
    pairs[number % 3][0].sendall(call % number)
answers = [ours.makefile("rb") for ours, _ in pairs]
print(sum(b'"result":true' in answers[number % 3].readline() for number in range(200)))
"""


def test_two_hundred_calls_run_at_once_in_a_gigabyte() -> None:
    """The kernel counts whole stacks: calls that wait for each other would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", MEETING], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "200\n", done.stderr
