"""The operator's chat model, as environments may ask it: within limits, and without its key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from aenv_ray import chat_endpoint
from aenv_ray.actors.host import model_relay
from aenv_ray.actors.host.model_relay import ModelRelay
from aenv_ray.config import Settings
from aenv_ray.errors import (
    AenvError,
    ConfigError,
    EndpointUnavailable,
    PolicyRefused,
    ToolTimeout,
    is_infrastructure,
)
from aenv_ray.ids import InstanceId
from tests.emulators.model_endpoint import completion, serving

ONE, OTHER = InstanceId("tau2-aaaaaaaa"), InstanceId("tau2-bbbbbbbb")
KEY = "sk-the-key"
BODY = {"messages": [{"role": "user", "content": "Hello"}]}
ANSWER = {
    "id": "x", "model": "m-1", "usage": {"total_tokens": 60},
    "choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
}  # fmt: skip
Respond = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    monkeypatch.setattr(chat_endpoint, "_FIRST_PAUSE_S", 0.0)


def relay(respond: Respond, **limits: Any) -> ModelRelay:
    given = Settings(
        chat_model_url="http://model.example/v1", chat_model="m", chat_model_key_env="THE_KEY",
        **limits,
    )  # fmt: skip
    return ModelRelay(given, httpx.AsyncClient(transport=httpx.MockTransport(respond)))


def params(body: Any = BODY, timeout_s: Any = 5.0) -> dict[str, Any]:
    return {"body": body, "timeout_s": timeout_s}


async def test_the_host_adds_model_and_key_and_returns_only_the_answer() -> None:
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=ANSWER, headers={"x-secret": KEY})

    one = relay(respond)
    assert await one.answer(ONE, {}) == b"{}"
    answer = await one.answer(ONE, params({**BODY, "temperature": 0.5}))
    assert json.loads(answer) == {
        "choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"total_tokens": 60},
        "model": "m-1",
    }
    (request,) = asked
    assert str(request.url) == "http://model.example/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert json.loads(request.content) == {**BODY, "temperature": 0.5, "model": "m"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (params({**BODY, "model": "dearer"}), "model"),
        (params({**BODY, "stream": True}), "stream"),
        (params({"messages": []}), "messages"),
        (params({"messages": [{"content": "x" * model_relay.MAX_REQUEST_BYTES}]}), "bytes"),
        (params(None), "malformed"),
        (params(timeout_s=0), "timeout"),
        (params(timeout_s=1e9), "timeout"),
        (params(timeout_s="5"), "timeout"),
    ],
)
async def test_a_sandbox_decides_nothing_but_the_conversation(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await relay(lambda _: pytest.fail("it was sent")).answer(ONE, given)


async def test_each_instance_has_a_limit_of_tokens_and_requests() -> None:
    one = relay(lambda _: httpx.Response(200, json=ANSWER), chat_model_max_tokens=100)
    for _ in range(2):
        await one.answer(ONE, params())
    with pytest.raises(PolicyRefused, match="100 tokens") as raised:
        await one.answer(ONE, params())
    assert "AENV_CHAT_MODEL_MAX_TOKENS" in str(raised.value.hint)
    await one.answer(OTHER, params())
    one.forget(ONE)
    await one.answer(ONE, params())
    few = relay(lambda _: httpx.Response(200, json=ANSWER), chat_model_max_requests=1)
    await few.answer(ONE, params())
    with pytest.raises(PolicyRefused, match="1 requests"):
        await few.answer(ONE, params())


async def test_an_instance_cannot_take_all_connections() -> None:
    release = asyncio.Event()

    async def slow(_: httpx.Request) -> httpx.Response:
        await release.wait()
        return httpx.Response(200, json=ANSWER)

    one = relay(slow)  # type: ignore[arg-type]
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        running = [
            group.create_task(one.answer(ONE, params()))
            for _ in range(model_relay.CONCURRENT_OF_INSTANCE)
        ]
        await asyncio.sleep(0)
        with pytest.raises(PolicyRefused, match="concurrent"):
            await one.answer(ONE, params())
        release.set()
    assert all(task.result() for task in running)
    assert await one.answer(ONE, params())


@pytest.mark.parametrize(
    ("response", "kind", "sent"),
    [
        (httpx.Response(500, text=f"broken {KEY}"), EndpointUnavailable, model_relay.ATTEMPTS + 1),
        (httpx.Response(429), EndpointUnavailable, model_relay.ATTEMPTS + 1),
        (httpx.Response(200, text="no JSON"), EndpointUnavailable, model_relay.ATTEMPTS + 1),
        (httpx.Response(200, json={"choices": []}), EndpointUnavailable, model_relay.ATTEMPTS + 1),
        (httpx.Response(401, text=f"bad key {KEY}"), ConfigError, 1),
        (httpx.Response(302, headers={"location": "http://elsewhere/"}), ConfigError, 1),
    ],
)
async def test_a_failing_endpoint_is_an_error_without_the_key(
    response: httpx.Response, kind: type[AenvError], sent: int
) -> None:
    """Invariant 10: secrets appear in no error."""
    count = 0

    def respond(_: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        return response

    with pytest.raises(kind) as raised:
        await relay(respond).answer(ONE, params())
    assert KEY not in f"{raised.value} {raised.value.hint}"
    assert count == sent


async def test_an_endpoint_that_does_not_answer_ends_with_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_relay, "_OWN_REQUEST_S", 0.01)

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(EndpointUnavailable, match=ONE):
        await relay(never).answer(ONE, params(timeout_s=0.01))  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [httpx.Response(200, json=ANSWER), httpx.Response(400)])
@pytest.mark.parametrize("fails", [True, False])
async def test_a_request_at_which_a_working_endpoint_fails_is_no_failure_of_the_infrastructure(
    own: httpx.Response, fails: bool
) -> None:
    """Invariant 14: an agent may choose the content and the timeout, and would void its episode."""

    async def respond(request: httpx.Request) -> httpx.Response:
        if b"Hello" not in request.content:
            return own
        if not fails:
            await asyncio.Event().wait()
        return httpx.Response(500)

    error = ConfigError if fails else ToolTimeout
    with pytest.raises(error) as raised:
        await relay(respond).answer(ONE, params(timeout_s=5.0 if fails else 0.01))  # type: ignore[arg-type]
    assert not is_infrastructure(raised.value)


async def test_without_an_endpoint_the_error_names_the_settings() -> None:
    with pytest.raises(ConfigError) as raised:
        await ModelRelay(Settings()).answer(ONE, {})
    assert "AENV_CHAT_MODEL_URL" in str(raised.value.hint)


async def test_a_pause_that_the_endpoint_asks_for_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(model_relay.asyncio, "sleep", sleep)
    answers = [httpx.Response(429, headers={"Retry-After": "20"}), httpx.Response(200, json=ANSWER)]
    answer = await relay(lambda _: answers.pop(0)).answer(ONE, params(timeout_s=60.0))
    assert json.loads(answer)["model"] == "m-1"
    assert pauses == [20.0]


async def test_a_model_on_the_node_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of a proxy that the node's environment names."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(completion("Hi")) as endpoint:
        one = ModelRelay(Settings(chat_model_url=endpoint.url, chat_model="m"))
        answer = await one.answer(ONE, params())
        await one.close()
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Hi"
