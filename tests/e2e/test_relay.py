"""An image's own server behind our fast door answers as the fast door itself does."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from aenv_ray.models import ToolResult
from aenv_ray.runtime.container.relay import registry_of
from aenv_ray.runtime.container.relay_http import PublicServer
from aenv_ray.runtime.door.dispatch import Dispatcher
from tests.e2e.serving import Server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def relay(server: Server) -> Dispatcher:
    """Return what a container's runtime runs before its image's server."""
    port = urlsplit(server.url).port
    assert port is not None
    return Dispatcher(registry_of(PublicServer(port)))


def relayed(relay: Dispatcher, method: str, params: dict[str, Any]) -> Any:
    outcomes: list[bytes] = []
    relay.submit(method, params, outcomes.append)
    return json.loads(b"{" + outcomes[0] + b"}")


def direct(server: Server, method: str, params: dict[str, Any]) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30.0)
        sock.connect(str(server.socket))
        sock.sendall(json.dumps(message).encode() + b"\n")
        return json.loads(sock.makefile("rb").readline())


CALLS = [
    ("tools/call", "echo", {"text": "ab", "times": 2}),
    ("tools/call", "aecho", {"text": "ü"}),
    ("tools/call", "add", {"a": 1, "b": 2}),
    ("tools/call", "add", {"a": "one", "b": 2}),
    ("tools/call", "add", {"a": 1}),
    ("tools/call", "add", {"a": 1, "b": 2, "c": 3}),
    ("tools/call", "move-point", {"point": {"x": 1, "y": 2}, "by": [1, 1]}),
    ("tools/call", "nothing", {}),
    ("tools/call", "not_a_number", {}),
    ("tools/call", "some_bytes", {}),
    ("tools/call", "picture", {}),
    ("tools/call", "mixed", {}),
    ("tools/call", "broken", {}),
    ("tools/call", "unsendable", {}),
    ("tools/call", "too_slow", {}),
    ("tools/call", "no-such-tool", {}),
    ("aenv/reward", None, {"answer": "42"}),
    ("aenv/reward", "score", {"answer": "41"}),
    ("aenv/reward", "length", {"answer": "four"}),
    ("aenv/reward", "length", {}),
    ("aenv/reward", "broken-reward", {}),
    ("aenv/reward", "no-such-reward", {}),
    ("aenv/function", "reset", {"seed": 7}),
    ("aenv/function", "reset", {"seed": "x"}),
    ("aenv/function", "set_note", {"note": "n"}),
    ("aenv/function", "lookup", {"key": "k", "limit": 3, "tags": ["a", "b"]}),
    ("aenv/function", "no-such-function", {}),
]


@pytest.mark.parametrize(("method", "name", "arguments"), CALLS)
def test_a_relayed_call_gives_what_the_fast_door_gives(
    server: Server, relay: Dispatcher, method: str, name: str | None, arguments: dict[str, Any]
) -> None:
    params = {"name": name, "arguments": arguments}
    ours, theirs = direct(server, method, params), relayed(relay, method, params)
    assert ours.keys() - {"jsonrpc", "id"} == theirs.keys(), (ours, theirs)
    if "error" in ours:
        assert theirs["error"]["data"]["code"] == ours["error"]["data"]["code"]
    elif method == "tools/call":
        one, other = ToolResult.from_wire(ours["result"]), ToolResult.from_wire(theirs["result"])
        assert (other.content, other.is_error) == (one.content, one.is_error)
        assert other.data == one.data
    else:
        assert theirs["result"] == ours["result"]


def test_a_relay_lists_what_the_server_lists(server: Server, relay: Dispatcher) -> None:
    for method in ("tools/list", "aenv/functions"):
        ours, theirs = direct(server, method, {})["result"], relayed(relay, method, {})["result"]
        for kind in ours.keys() - {"total", "health"}:
            names = [[entry["name"] for entry in listed[kind]] for listed in (ours, theirs)]
            assert names[0] == names[1]


def test_progress_passes_through_a_relay(relay: Dispatcher) -> None:
    reports: list[float] = []
    outcomes: list[bytes] = []
    params = {"name": "steps", "arguments": {"total": 3}, "_meta": {"progressToken": "p"}}
    relay.submit("tools/call", params, outcomes.append, lambda done, *_: reports.append(done))
    assert json.loads(b"{" + outcomes[0] + b"}")["result"]["isError"] is False
    assert len(reports) == 3
