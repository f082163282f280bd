"""Agents as environments: what they answer, what they remember, and the project of one."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.integrations.agents import agent_env
from aenv_ray.project import project
from aenv_ray.runtime import ChatEndpoint
from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door import agent as agent_module
from aenv_ray.runtime.door.agent import serve_agent
from tests.fixtures import chat_agents as agents

AGENTS = Path(agents.__file__)


class Served:
    """A served agent, called as its environment's functions are."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def chat(self, message: str, conversation: str = "") -> str:
        answer = await self.registry.tool("chat").runnable(message, conversation)
        return str(answer)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve agents in a registry of this test."""
    from aenv_ray.runtime.api import decorators

    registry = Registry()
    monkeypatch.setattr(decorators, "get_registry", lambda: registry)

    def serve(agent: Any, reward: Any = None) -> Served:
        serve_agent(agent, reward)
        return Served(registry)

    return serve


@pytest.mark.parametrize("kind", [agents.echo, agents.echo_async], ids=["sync", "async"])
async def test_a_callable_gets_the_history_of_its_conversation(served: Any, kind: Any) -> None:
    one = served(kind)
    assert await one.chat("a") == "1: a"
    assert await one.chat("b") == "3: b"
    assert await one.chat("c", "other") == "1: c"
    roles = [m["role"] for m in one.registry.function("history").runnable("")]
    assert roles == ["user", "assistant"] * 2
    assert one.registry.function("forget").runnable("other") == 2
    one.registry.reset.runnable()
    assert await one.chat("d") == "1: d"


async def test_pieces_of_an_answer_are_progress(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Call:
        def progress(self, done: float, total: float | None = None, message: str = "") -> None:
            told.append(message)

    monkeypatch.setattr(agent_module, "current_call", Call)
    assert await served(agents.in_pieces).chat("one two") == "one two "
    assert told == ["one ", "two "]


async def test_a_double_of_camels_agent_has_a_memory_for_each_conversation(served: Any) -> None:
    one = served(agents.camel)
    assert await one.chat("a") == "heard a"
    assert await one.chat("b") == "heard a, b"
    assert await one.chat("c", "other") == "heard c"


async def test_a_reward_sees_the_conversation(served: Any) -> None:
    one = served(agents.echo, agents.count)
    await one.chat("a")
    await one.chat("b")
    assert await one.registry.reward(None).runnable() == 2.0


async def test_a_message_without_an_answer_is_not_in_the_history(served: Any) -> None:
    def fail(messages: Any) -> str:
        raise OSError("no model")

    one = served(fail)
    with pytest.raises(OSError, match="no model"):
        await one.chat("a")
    assert one.registry.function("history").runnable("") == []


# --- endpoints -----------------------------------------------------------------------------------


class _Model(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []  # noqa: RUF012
    streams = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "key": self.headers.get("Authorization")})
        if body["messages"][-1]["content"] == "fail":
            self.send_response(500)
            self.end_headers()
            self.wfile.write(f"no model for {self.headers['Authorization']}".encode())
            return
        if body["messages"][-1]["content"] == "moved":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        self.send_response(200)
        kind = "text/event-stream" if self.streams else "application/json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        if not self.streams:
            answer = {"choices": [{"message": {"content": "Hello"}}]}
            self.wfile.write(json.dumps(answer).encode())
            return
        for text in ("Hel", "lo", None):
            chunk = {"choices": [{"delta": {"content": text}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.asked.append({"path": self.path, "key": self.headers.get("Authorization")})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": [{"message": {"content": "from elsewhere"}}]}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[str]:
    _Model.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize("streams", [True, False])
async def test_an_endpoint_answers(
    served: Any, model: str, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr(_Model, "streams", streams)
    monkeypatch.setenv("THE_KEY", "k")
    one = served(ChatEndpoint(model, "m", key_env="THE_KEY", system="Be brief."))
    assert await one.chat("Hi") == "Hello"
    asked = _Model.asked[-1]
    assert (asked["model"], asked["key"]) == ("m", "Bearer k")
    assert [m["role"] for m in asked["messages"]] == ["system", "user"]
    with pytest.raises(RuntimeError, match="HTTP 500"):
        await one.chat("fail")


async def test_the_key_of_an_endpoint_is_in_no_error_and_not_sent_elsewhere(
    served: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 10."""
    monkeypatch.setenv("THE_KEY", "sesame")
    one = served(ChatEndpoint(model, key_env="THE_KEY"))
    with pytest.raises(RuntimeError, match=r"no model for Bearer \[key\]") as raised:
        await one.chat("fail")
    assert "sesame" not in str(raised.value)
    assert await one.chat("moved") == "from elsewhere"
    first, second = _Model.asked[-2:]
    assert first["key"] == "Bearer sesame"
    assert second == {"path": "/elsewhere", "key": None}


# --- the project ---------------------------------------------------------------------------------


def test_the_project_has_the_file_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("my_agents", AGENTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_agents", module)
    spec.loader.exec_module(module)
    root = agent_env(
        module.camel, name="helper", reward=module.count, network="none", directory=tmp_path / "p",
        requirements=["tinycss2"], environment_variables={"A": "1"},
    )  # fmt: skip
    found = project.resolve(root)
    assert found.reference == "helper@1.0.0"
    assert found.config.deploy.variables == {"A": "1"}
    assert (root / "src" / "chat_agents.py").read_text() == AGENTS.read_text()
    wrapper = (root / "src" / "serve_the_agent.py").read_text()
    assert (
        "from chat_agents import camel as agent\nfrom chat_agents import count as reward" in wrapper
    )
    assert (root / "requirements.txt").read_text() == "tinycss2\n"


def test_the_same_agent_has_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aenv_ray.config import settings

    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        endpoint = ChatEndpoint("http://model.example/v1")
        one = agent_env(endpoint, name="helper")
        assert one == agent_env(endpoint, name="helper")
        assert one != agent_env(endpoint, name="helper", version="2.0.0")
        assert one.is_relative_to(tmp_path)
    finally:
        settings.cache_clear()


def test_an_agent_in_a_file_that_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my-agent.py"
    file.write_text("def agent(messages):\n    return 'hi'\n")
    spec = importlib.util.spec_from_file_location("my-agent", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my-agent", module)
    spec.loader.exec_module(module)
    with pytest.raises(ConfigError, match=r"my-agent\.py of the agent .* Python identifier"):
        agent_env(module.agent, name="helper")


@pytest.mark.parametrize(
    ("agent", "words"),
    [(3, "int is not an agent"), (lambda messages: "", "not at the top level of a file")],
)
def test_what_is_no_agent_is_refused(agent: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        agent_env(agent, name="helper")
