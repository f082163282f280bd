"""An OpenAI-compatible endpoint over real HTTP: answers, retries, and what failures mean."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pydantic import SecretStr

from aenv_ray.errors import AenvError, ConfigError, EndpointUnavailable, Forbidden, Unauthorized
from aenv_ray.sampling.policies.chat import ContextFull, EndpointLimited, Filtered
from aenv_ray.sampling.policies.completion import Completion
from aenv_ray.sampling.policies.endpoint import Endpoint, EndpointOptions
from tests.emulators.model_endpoint import (
    ModelEndpoint,
    body,
    completion,
    delta,
    dies,
    refusal,
    serving,
    silent,
    stream,
    tool_call,
)

KEY = "sk-secret-0123456789"
MESSAGES = [{"role": "user", "content": "go"}]


def ask(endpoint: ModelEndpoint, **options: Any) -> tuple[Completion, list[float]]:
    """Return the answer, and the pauses before it."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def asked() -> Completion:
        given = EndpointOptions(model="m", base_url=endpoint.url, **options)
        client = Endpoint(given, sleep)
        try:
            return await client.complete(MESSAGES, [])
        finally:
            await client.close()

    return asyncio.run(asked()), pauses


# --- answers --------------------------------------------------------------------------------------


def test_a_request_has_the_model_messages_key_and_extra_fields() -> None:
    with serving(completion("hello")) as endpoint:
        answer, _ = ask(endpoint, api_key=SecretStr(KEY), request={"temperature": 0.5})
    assert answer == Completion(
        "hello", finish_reason="stop", prompt_tokens=10, completion_tokens=5
    )
    assert endpoint.requests == [
        {"path": "/v1/chat/completions", "model": "m", "messages": MESSAGES, "temperature": 0.5}
    ]
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_no_key_is_sent_to_an_endpoint_without_one() -> None:
    with serving(completion("hello")) as endpoint:
        ask(endpoint)
    assert "Authorization" not in endpoint.headers[0]


def test_a_stream_gives_the_same_answer() -> None:
    parts = [
        delta(role="assistant", content=""),
        delta(content="two "),
        delta(content="calls", reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "add", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a": '}}]),
        delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "echo"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}]),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25}},
    ]
    whole = completion("two calls", tool_call("add", {"a": 1}, "a"), tool_call("echo", {}, "b"))
    with serving(stream(*parts)) as endpoint:
        streamed, _ = ask(endpoint, stream=True)
    assert endpoint.requests[0]["stream_options"] == {"include_usage": True}
    with serving(whole) as endpoint:
        at_once, _ = ask(endpoint)
    assert streamed.requests == at_once.requests
    assert streamed.text == at_once.text == "two calls"
    assert (streamed.reasoning, streamed.cost) == ("hm", 0.25)
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (10, 5)


def part(call_id: str | None, name: str | None, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    "parts",
    [
        [part("a", "add", "{}", index=0), part("b", "echo", '{"x": 1}', index=0)],
        [part("a", "add", "{}", index=None), part("b", "echo", '{"x": 1}', index=None)],
        [part("a", "add", "{}"), part("b", "echo", ""), part(None, None, '{"x": 1}')],
        [
            part("a", "add", "", index=0), part("a2", None, "{}", index=0),
            part("b", "echo", '{"x"', index=1), part("b2", None, ": 1}", index=1),
        ],
    ],
    ids=["one index for all", "null as index", "no index", "a new id for each part"],
)  # fmt: skip
def test_parallel_calls_of_a_stream_are_kept_apart(parts: list[dict[str, Any]]) -> None:
    chunks = [delta(tool_calls=[one]) for one in parts]
    with serving(stream(*chunks, delta("tool_calls"))) as endpoint:
        answer, _ = ask(endpoint, stream=True, attempts=1)
    assert [(one.call_id, one.name, one.arguments) for one in answer.requests] == [
        ("a", "add", "{}"),
        ("b", "echo", '{"x": 1}'),
    ]


def test_an_endpoint_that_cannot_stream_may_answer_at_once() -> None:
    with serving(completion("hello")) as endpoint:
        assert ask(endpoint, stream=True)[0].text == "hello"


def test_text_that_utf_8_cannot_encode_is_replaced() -> None:
    with serving(body('{"choices": [{"message": {"content": "a\\ud800b"}}]}')) as endpoint:
        assert ask(endpoint)[0].text == "a\ufffdb"


# --- retries --------------------------------------------------------------------------------------

PASSING = {
    "429": refusal(429, "slow down"),
    "500": refusal(500, "oops"),
    "503 with HTML": body("<html>busy</html>", 503),
    "dies": dies,
    "silent": silent,
    "not JSON": body("hello"),
    "no choices": body({"choices": []}),
    "no message": body({"choices": [{"text": "old API"}]}),
    "empty message": body({"choices": [{"message": {"role": "assistant"}}]}),
    "a list": body([1, 2]),
    "deeply nested": body("[" * 100_000),
    "stream dies": stream(delta(content="hel"), done=False),
    "stream ends early": stream(delta(content="hel")),
    "stream of nonsense": stream("nonsense"),
    "stream of numbers": stream(1, 2),
    "stream with malformed choices": stream({"choices": [7]}),
    "error in the stream": stream({"error": {"message": "out of memory"}}),
    "error 500 in the stream": stream(delta(content="hel"), {"error": {"code": 500}}),
    "error as a text": body({"error": "out of memory"}),
    "error 503 in an answer": body({"error": {"message": "busy", "code": "503"}}),
}


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_a_temporary_failure_is_retried(failure: Any) -> None:
    with serving(failure, completion("hello")) as endpoint:
        answer, pauses = ask(endpoint, timeout_s=0.5 if failure is silent else 60.0)
    assert answer.text == "hello"
    assert len(pauses) == 1


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_a_lasting_failure_voids_the_episode(failure: Any) -> None:
    """Invariant 2: an endpoint's failure is never an answer."""
    with serving(failure) as endpoint, pytest.raises(EndpointUnavailable) as raised:
        ask(endpoint, attempts=2, timeout_s=0.2 if failure is silent else 60.0)
    assert endpoint.url in raised.value.message
    assert len(endpoint.requests) == 2


def test_an_unreachable_endpoint_is_reported() -> None:
    with serving(silent) as endpoint:
        pass
    with pytest.raises(EndpointUnavailable, match="ConnectError"):
        ask(endpoint, attempts=2)


def test_pauses_grow_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    with serving(*[refusal(500, "oops")] * 12, completion("hello")) as endpoint:
        _, pauses = ask(endpoint, attempts=13)
    (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "failed: HTTP 500" in warning
    assert warning.endswith("it is asked again, up to 13 times")
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses[:7]))
    assert all(30 <= pause <= 60 for pause in pauses[8:])


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry_After": "17"},
        {"Retry_After": "17.0"},
        {
            "Retry_After": "Fri, 31 Dec 1999 23:59:59 GMT",
            "Date": "Fri, 31 Dec 1999 23:59:42 GMT",
        },
    ],
)
def test_the_pause_that_an_endpoint_requests_is_kept(headers: dict[str, str]) -> None:
    def limited(handler: Any) -> None:
        handler.send_response_only(429)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serving(limited, completion("hello")) as endpoint:
        _, pauses = ask(endpoint)
    assert pauses == [17.0]


def test_a_requested_pause_of_minutes_is_kept_while_attempts_are_left() -> None:
    limited = refusal(429, "slow down", Retry_After="120")
    with serving(limited, limited, completion("hello")) as endpoint:
        answer, pauses = ask(endpoint)
    assert (answer.text, pauses) == ("hello", [120.0, 120.0])
    with serving(limited) as endpoint, pytest.raises(EndpointUnavailable, match="120 s"):
        ask(endpoint)
    assert len(endpoint.requests) == 5  # the sixth would come too soon


def test_a_requested_pause_of_hours_fails_immediately() -> None:
    limited = refusal(429, "daily limit", Retry_After="7200")
    with serving(limited) as endpoint, pytest.raises(EndpointUnavailable, match="7200 s"):
        ask(endpoint)
    assert len(endpoint.requests) == 1


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refusal(401, f"wrong key {KEY}"), Unauthorized),
        (refusal(403, "not from here"), Forbidden),
        (refusal(404, "no model m"), ConfigError),
        (refusal(400, "temperature must be at most 2"), ConfigError),
        (body("moved", 307, Location="http://127.0.0.1:1/v1"), ConfigError),
        (refusal(400, "maximum context length is 4096 tokens"), ContextFull),
        (refusal(413, "too large"), ContextFull),
        (refusal(400, "content_filter: not here"), Filtered),
    ],
)
def test_a_refusal_has_its_error_type_and_is_not_retried(
    answer: Any, error: type[Exception]
) -> None:
    with serving(answer) as endpoint, pytest.raises(error) as raised:
        ask(endpoint, api_key=SecretStr(KEY))
    assert len(endpoint.requests) == 1
    assert type(raised.value) is error


TOO_LONG = {
    "OpenAI": (400, "This model's maximum context length is 8192 tokens. However, ..."),
    "vLLM": (400, "The decoder prompt (length 9000) is longer than the maximum model length of 8"),
    "llama.cpp": (400, "the request exceeds the available context size, try increasing it"),
    "llama.cpp, answering": (500, "Context size has been exceeded."),
    "TGI": (422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` ..."),
    "TGI, input": (422, "`inputs` must have less than 1024 tokens. Given: 2000"),
    "TensorRT-LLM": (400, "Prompt length (5000) exceeds maximum input length (4096)."),
    "Anthropic": (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200"),
    "Gemini": (400, "The input token count (9) exceeds the maximum number of tokens allowed (8)."),
    "Bedrock": (400, "Input is too long for requested model."),
    "xAI": (400, "This model's maximum prompt length is 131072 but the request contains 140000"),
    "Moonshot": (400, "Invalid request: Your request exceeded model token limit: 8192"),
    "DashScope": (400, "Range of input length should be [1, 30720]"),
    "a proxy": (500, "litellm.ContextWindowExceededError: ..."),
}


@pytest.mark.parametrize(("status", "message"), TOO_LONG.values(), ids=TOO_LONG)
@pytest.mark.parametrize("sent", ["status", "answer", "stream", "later", "text code", "error:"])
def test_a_conversation_that_is_too_long_is_recognized(
    status: int, message: str, sent: str
) -> None:
    """Of common servers, and also when the error comes with status 200; it is not asked again."""
    error = {"error": {"message": message, "type": "x", "code": status}}
    answers = {
        "status": refusal(status, message),
        "answer": body(error),
        "stream": stream(error),
        "later": stream(delta(content="hel"), error),
        "text code": stream({"error": {"message": message, "code": str(status)}}),
        "error:": stream(delta(content="hel"), last=("error", error["error"])),
    }
    with serving(answers[sent]) as endpoint, pytest.raises(ContextFull):
        ask(endpoint, stream=True)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory: failed to create a context of size 131072",
        "cannot allocate the context window",
        "too many tokens in flight",
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_server_that_fails_for_its_context_voids_the_episode(
    message: str, is_streamed: bool
) -> None:
    """Invariant 2: only what cannot mean a failure of the server is an outcome."""
    error = {"error": {"message": message, "code": 500}}
    answer = stream(error) if is_streamed else refusal(500, message)
    with serving(answer) as endpoint, pytest.raises(EndpointUnavailable):
        ask(endpoint, attempts=2)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("Input validation error: `inputs` must have less than 1024 tokens.", ContextFull),
        ({"message": "maximum context length", "code": "context_length_exceeded"}, ContextFull),
        ({"message": "content_filter: not here"}, Filtered),
        ({"message": "content_filter: not here", "code": 400}, Filtered),
        ({"message": f"wrong key {KEY}", "code": 401}, Unauthorized),
        ({"message": "no model m", "code": 404}, ConfigError),
        ({"message": "Request too large for m: tokens per minute", "code": 429}, ContextFull),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_with_status_200_is_what_it_would_be_with_its_code(
    error: Any, raised: type[Exception], is_streamed: bool
) -> None:
    answer = stream({"error": error}) if is_streamed else body({"error": error, "choices": []})
    with serving(answer) as endpoint, pytest.raises(raised) as found:
        ask(endpoint, api_key=SecretStr(KEY), stream=True)
    assert type(found.value) is raised
    assert KEY not in str(found.value)
    assert len(endpoint.requests) == 1


def test_a_limit_that_a_stream_reports_is_a_limit() -> None:
    """So the opening is not asked, either."""
    limited = stream({"error": {"message": "slow down", "code": 429}})
    with serving(limited) as endpoint, pytest.raises(EndpointLimited):
        ask(endpoint, stream=True, attempts=2)


def test_the_key_does_not_appear_in_errors_logs_or_reprs(caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 10."""
    caplog.set_level(logging.DEBUG)
    echo = refusal(401, f"wrong key {KEY}")
    with serving(refusal(500, KEY), echo) as endpoint, pytest.raises(AenvError) as raised:
        ask(endpoint, api_key=SecretStr(KEY))
    shown = f"{raised.value!r} {raised.value.message} {caplog.text}"
    assert KEY not in shown
    assert "[key]" in raised.value.message
    assert KEY not in repr(EndpointOptions(model="m", api_key=SecretStr(KEY)))
