"""The tool-calling loop with a model behind a real HTTP server, over an environment in memory."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
from collections.abc import Mapping
from typing import Any, cast

import pytest

from aenv_ray.errors import (
    ConfigError,
    ConversationRefused,
    EndpointUnavailable,
    Forbidden,
    SandboxDiedInside,
    ToolError,
    ToolTimeout,
)
from aenv_ray.models import ToolResult
from aenv_ray.sampling import OpenAIPolicy, Task, Usage
from aenv_ray.sampling.episode_env import EpisodeEnv, EpisodeLog
from aenv_ray.sampling.policies import base, chat
from aenv_ray.sampling.policies.chat import rendered
from tests.emulators.model_endpoint import (
    Answer,
    ModelEndpoint,
    body,
    completion,
    delta,
    dies,
    refusal,
    serving,
    stream,
    tool_call,
)

TASK = Task.model_validate({"id": "t1", "instruction": "Add 1.", "level": {"name": "easy", "n": 2}})
PNG = b"\x89PNG\r\n\x1a\n and so on"
PIXEL = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}


class FakeInstance:
    """Tools in memory, as an instance has them."""

    def __init__(self) -> None:
        self.handle = self
        self.instance_id = "fake-1"
        self.running = 0
        self.most_running = 0
        self.call_ids: list[str | None] = []
        self.pictures: list[dict[str, Any]] = [PIXEL]

    async def list_tools(self) -> list[dict[str, Any]]:
        names = ("add", "fs/read file", "picture", "raises", "slow", "dies")
        return [{"name": name, "inputSchema": {"type": "object"}} for name in names]

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None,
        timeout_s: float,
        call_id: str | None = None,
    ) -> ToolResult:
        self.call_ids.append(call_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        match name:
            case "add":
                return text(str((arguments or {})["a"] + 1))
            case "fs/read file":
                return text("x" * 100)
            case "picture":
                return ToolResult([{"type": "text", "text": "see"}, *self.pictures])
            case "raises":
                return ToolResult([{"type": "text", "text": "alas"}], is_error=True)
            case "slow":
                raise ToolTimeout("no result within 60 s", tool_name=name)
            case "dies":
                raise SandboxDiedInside("it exited", died_of="exit", instance_id="fake-1")
        raise ToolError(f"no tool {name}", tool_name=name)


def text(value: str) -> ToolResult:
    return ToolResult([{"type": "text", "text": value}])


class Played:
    """One episode and what it left."""

    def __init__(
        self,
        endpoint: ModelEndpoint,
        task: Task = TASK,
        log: EpisodeLog | None = None,
        pictures: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.instance = FakeInstance()
        self.instance.pictures = pictures or [PIXEL]
        self.log = log or EpisodeLog()
        env = EpisodeEnv(self.instance, self.log)  # type: ignore[arg-type]  # has what is used
        policy = OpenAIPolicy("m", base_url=endpoint.url, **options)
        self.output = asyncio.run(policy(env, task))

    @property
    def told(self) -> list[str]:
        """What the model was told of its calls."""
        return [message["content"] for message in self.log.messages if message["role"] == "tool"]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def test_calls_and_results_alternate_until_an_answer() -> None:
    calls = completion(None, tool_call("add", {"a": 1}), usage=(10, 5))
    with serving(calls, completion("It is 2.", usage=(20, 3))) as endpoint:
        played = Played(endpoint, prices=(1e6, 1e7))
    assert played.output == {"stop": "answered", "turns": 2, "text": "It is 2."}
    first, second = endpoint.requests
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "Add 1."
    assert second["messages"] == played.log.messages[:-1]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    (step,) = played.log.steps
    assert step.tool == "add"
    assert (step.call_id, step.started_s is not None) == (played.instance.call_ids[0], True)
    assert played.log.usage == Usage(requests=2, prompt_tokens=30, completion_tokens=8, cost=110.0)


def test_calls_of_one_answer_run_in_parallel_and_keep_their_order() -> None:
    calls = [tool_call("add", {"a": n}, f"c{n}") for n in range(5)]
    with serving(completion(None, *calls), completion("done")) as endpoint:
        played = Played(endpoint)
        assert played.told == ["1", "2", "3", "4", "5"]
        assert played.instance.most_running == 5
    with serving(completion(None, *calls), completion("done")) as endpoint:
        assert Played(endpoint, parallel=False).instance.most_running == 1


def test_names_are_translated_to_those_that_endpoints_accept() -> None:
    with serving(completion(None, tool_call("fs_read_file", {})), completion("ok")) as endpoint:
        played = Played(endpoint)
    names = [tool["function"]["name"] for tool in endpoint.requests[0]["tools"]]
    assert "fs_read_file" in names
    assert [step.tool for step in played.log.steps] == ["fs/read file"]


def test_the_tools_that_the_model_had_are_recorded_as_one_attachment() -> None:
    with serving(completion("hello")) as endpoint:
        first, second = Played(endpoint), Played(endpoint)
    assert first.log.tools == second.log.tools, "so episodes share its file"
    recorded = first.log.tools
    assert recorded is not None
    assert recorded.media_type == "application/json"
    assert json.loads(first.log.contents[recorded.digest]) == endpoint.requests[0]["tools"]


class _OwnEnvironment:
    """An environment of a program that plays without `sample`."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []

    async def list_tools(self) -> list[dict[str, Any]]:
        return await FakeInstance().list_tools()

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = 60.0
    ) -> ToolResult:
        return await FakeInstance().call_tool(name, arguments, timeout_s)

    def record_message(self, message: Mapping[str, Any]) -> None:
        self.messages.append(message)

    def record_usage(self, **usage: Any) -> None:
        """Nobody counts it."""


def test_an_environment_of_a_program_needs_no_record_of_tools() -> None:
    env = _OwnEnvironment()
    with serving(completion(None, tool_call("add", {"a": 1})), completion("2")) as endpoint:
        policy = OpenAIPolicy("m", base_url=endpoint.url)
        output = asyncio.run(policy(cast("EpisodeEnv", env), TASK))
    assert output["stop"] == "answered"
    assert [one["content"] for one in env.messages if one["role"] == "tool"] == ["2"]


def test_a_streamed_conversation_is_the_same() -> None:
    call = delta(tool_calls=[{"index": 0, **tool_call("add", {"a": 1})}])
    with serving(stream(call, delta("tool_calls")), stream(delta("stop", content="2"))) as endpoint:
        played = Played(endpoint, stream=True)
    assert played.output == {"stop": "answered", "turns": 2, "text": "2"}
    assert played.told == ["2"]


# --- what a model does wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (tool_call("nonsense", {}), "tool_not_found"),
        (tool_call("bad name!", {}), "tool_not_found"),
        (tool_call("add", '{"a": '), "tool_input_invalid"),
        (tool_call("add", "[1]"), "tool_input_invalid"),
        (tool_call("add", "[" * 100_000), "tool_input_invalid"),
        ({"id": "x", "type": "function"}, "tool_not_found"),
        ("call add", "tool_not_found"),
        (tool_call("raises", {}), "alas"),
        (tool_call("slow", {}), "tool_timeout"),
    ],
    ids=range(9),
)
def test_the_model_receives_the_error_of_an_invalid_call(call: Any, told: str) -> None:
    """The episode goes on, and the conversation stays one that endpoints accept."""
    with serving(completion(None, call), completion("sorry")) as endpoint:
        played = Played(endpoint)
    assert played.output["stop"] == "answered"
    assert played.told[0].startswith("error: ")
    assert told in played.told[0]
    assistant, tool = endpoint.requests[1]["messages"][-2:]
    (echoed,) = assistant["tool_calls"]
    assert echoed["id"] == tool["tool_call_id"]
    assert isinstance(json.loads(echoed["function"]["arguments"]), dict)
    assert set(echoed["function"]["name"]) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
    )


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (["same", "same"], ["same", "call_1"]),
        (["call_1", "call_1"], ["call_1", "call_2"]),
        (["call_1", None], ["call_1", "call_2"]),
        ([None, "call_0", ""], ["call_1", "call_0", "call_2"]),
        (["a", 7, "call_1"], ["a", "call_2", "call_1"]),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_with_equal_or_missing_ids_are_told_apart(
    given: list[Any], used: list[str], is_streamed: bool
) -> None:
    """Each of them runs, and the model is told its result."""
    calls = [{**tool_call("add", {"a": n}), "id": one} for n, one in enumerate(given)]
    answer = completion(None, *calls)
    if is_streamed:
        parts = [delta(tool_calls=[{"index": n, **call}]) for n, call in enumerate(calls)]
        answer = stream(*parts, delta("tool_calls"))
    with serving(answer, completion("ok")) as endpoint:
        played = Played(endpoint, stream=is_streamed)
    assistant, *tools = (m for m in played.log.messages if m["role"] in {"assistant", "tool"})
    assert [call["id"] for call in assistant["tool_calls"]] == used
    assert [tool["tool_call_id"] for tool in tools[:-1]] == used
    assert played.told == [str(n + 1) for n in range(len(given))]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_arguments_may_be_an_object(arguments: Any, is_streamed: bool) -> None:
    """As some servers send them, against OpenAI's format, which has text there."""
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": arguments}}
    whole = completion(None, call)
    streamed = stream(delta(tool_calls=[call]), delta("tool_calls"))
    with serving(streamed if is_streamed else whole, completion("ok")) as endpoint:
        played = Played(endpoint, stream=is_streamed, attempts=1)
    assert played.told == ["2"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_without_arguments_has_none(is_streamed: bool) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "fs_read_file", "arguments": None}}
    whole = completion(None, call)
    streamed = stream(delta(tool_calls=[call]), delta("tool_calls"))
    with serving(streamed if is_streamed else whole, completion("ok")) as endpoint:
        played = Played(endpoint, stream=is_streamed, attempts=1)
    assert played.told == ["x" * 100]


def test_a_sandbox_that_dies_ends_the_episode_with_its_error() -> None:
    calls = [tool_call("add", {"a": 1}, "a"), tool_call("dies", {}, "b")]
    with serving(completion(None, *calls)) as endpoint, pytest.raises(SandboxDiedInside):
        Played(endpoint)


# --- stops ----------------------------------------------------------------------------------------

AGAIN = completion("thinking", tool_call("add", {"a": 1}), usage=(100, 10))


def reporting(usage: Any) -> Answer:
    """Answer as `AGAIN` does, with this usage."""
    message = {"role": "assistant", "tool_calls": [tool_call("add", {"a": 1})]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    return body({"choices": [choice], "usage": usage})


@pytest.mark.parametrize(
    ("answer", "options", "stop", "turns"),
    [
        (AGAIN, {"max_turns": 3}, "max_turns", 3),
        (AGAIN, {"max_tokens": 200}, "max_tokens", 2),
        (AGAIN, {"max_cost": 1e-3, "prices": (5.0, 0.0)}, "max_cost", 2),
        (AGAIN, {"stop_tools": ("add",)}, "stop_tool", 1),
        (completion("half", finish_reason="length"), {}, "cut", 1),
        (completion(None, refusal="I will not."), {}, "refused", 1),
        (completion("", finish_reason="content_filter"), {}, "refused", 1),
        (refusal(400, "content_filter"), {}, "refused", 1),
        (refusal(400, "maximum context length is 10 tokens"), {}, "context_full", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_episode_stops_for_a_reason_that_its_output_names(
    answer: Any, options: dict[str, Any], stop: str, turns: int
) -> None:
    with serving(answer) as endpoint:
        played = Played(endpoint, **options)
    assert (played.output["stop"], played.output["turns"]) == (stop, turns)
    assert len(endpoint.requests) == turns


@pytest.mark.parametrize(
    ("usage", "options", "missing"),
    [
        (None, {"max_cost": 1.0, "prices": "reported"}, "the cost"),
        ({"cost": float("nan")}, {"max_cost": 1.0, "prices": "reported"}, "the cost"),
        ({"cost": -1.0}, {"max_cost": 1.0, "prices": "reported"}, "the cost"),
        ({"cost": True}, {"max_cost": 1.0, "prices": "reported"}, "the cost"),
        ({"cost": 10**400}, {"max_cost": 1.0, "prices": "reported"}, "the cost"),
        (None, {"max_tokens": 100}, "the tokens"),
        (None, {"max_tokens": 1_234_567}, "the tokens of .* max_tokens 1234567 cannot"),
        ({"prompt_tokens": float("nan")}, {"max_tokens": 100}, "the tokens"),
        (None, {"max_cost": 1.0, "prices": (1.0, 2.0)}, "the tokens"),
    ],
)
def test_a_token_limit_needs_usage_reported_by_the_endpoint(
    usage: Any, options: dict[str, Any], missing: str
) -> None:
    """Rather than play on without the limit."""
    with (
        serving(reporting(usage)) as endpoint,
        pytest.raises(ConfigError, match=f"did not report {missing}"),
    ):
        Played(endpoint, **options)
    assert len(endpoint.requests) == 1


def test_tokens_may_be_floats() -> None:
    answer = reporting({"prompt_tokens": 100.0, "completion_tokens": 10.0})
    with serving(answer) as endpoint:
        played = Played(endpoint, max_tokens=200)
    assert (played.output["stop"], played.output["turns"]) == ("max_tokens", 2)
    assert played.log.usage == Usage(requests=2, prompt_tokens=200, completion_tokens=20)


def test_an_episode_without_limits_needs_no_usage() -> None:
    with serving(reporting(None)) as endpoint:
        assert Played(endpoint, max_turns=2, prices=(1.0, 2.0)).output["stop"] == "max_turns"


def test_a_stop_tool_that_failed_does_not_stop() -> None:
    call = completion(None, tool_call("raises", {}))
    with serving(call, completion("gave up")) as endpoint:
        assert Played(endpoint, stop_tools=("raises",)).output["stop"] == "answered"


# --- results --------------------------------------------------------------------------------------


def test_a_long_result_is_truncated_with_a_note() -> None:
    """Invariant 12."""
    with serving(completion(None, tool_call("fs_read_file", {})), completion("ok")) as endpoint:
        (told,) = Played(endpoint, result_characters=10).told
    assert told == "xxxxxxxxxx\n[truncated: 100 characters]"


def test_images_are_sent_to_models_that_accept_them_and_described_to_others() -> None:
    calls = completion(None, tool_call("picture", {}))
    with serving(calls, completion("nice")) as endpoint:
        assert Played(endpoint).told == ["see\n[image image/png not shown]"]
    with serving(calls, completion("nice")) as endpoint:
        played = Played(endpoint, images=True)
    assert played.told == ["see"]
    shown = endpoint.requests[1]["messages"][-1]
    assert shown["role"] == "user"
    assert shown["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL['data']}"
    recorded = played.log.messages[-2]["content"][1]
    digest = f"sha256:{hashlib.sha256(PNG).hexdigest()}"
    assert recorded == {"type": "text", "text": f"[image/png, attachment {digest}]"}


def image(data: Any, media_type: Any = "image/png") -> dict[str, Any]:
    text = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return {"type": "image", "data": text, "mimeType": media_type}


@pytest.mark.parametrize(
    "block",
    [
        image(b"no image"), image(b""), image("&%$"), image("a"), image("\u00fc"), image(7),
        image(None), image(PIXEL["data"] + "\n"), {"type": "image"},
        image(b"RIFF0000AVI "), image(PNG + b"x" * 100),
    ],
)  # fmt: skip
def test_what_is_no_image_is_not_sent(
    block: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: the endpoint would refuse the request, which voids the episode."""
    monkeypatch.setattr(chat, "IMAGE_BYTES", 99)
    calls = completion(None, tool_call("picture", {}))
    with serving(calls, completion("nice")) as endpoint:
        played = Played(endpoint, images=True, pictures=[block, PIXEL])
    assert played.told == [f"see\n[image {block.get('mimeType', '')} not shown]"]
    _, only = endpoint.requests[1]["messages"][-1]["content"]
    assert only["image_url"]["url"].endswith(PIXEL["data"])
    with serving(calls, completion("nice")) as endpoint:
        assert Played(endpoint, images=True, pictures=[block]).told == played.told
    assert endpoint.requests[1]["messages"][-1]["role"] == "tool"


def test_the_images_of_an_episode_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: every request contains all of them, and runners play many episodes."""
    monkeypatch.setattr(chat, "EPISODE_IMAGES_BYTES", 3 * len(PNG))
    calls = completion(None, tool_call("picture", {}))
    with serving(calls, calls, completion("nice")) as endpoint:
        played = Played(endpoint, images=True, pictures=[PIXEL, dict(PIXEL)])
    assert played.told == ["see", "see\n[image image/png not shown]"]
    sent = json.dumps(endpoint.requests[2]["messages"])
    assert sent.count(PIXEL["data"]) == 3


@pytest.mark.parametrize("claimed", ["x/y", "", None, 7, "image/gif;a=,b", ["image/png"]])
@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"), (b"\xff\xd8\xff\xe0 JFIF", "image/jpeg"), (b"GIF89a...", "image/gif"),
        (b"RIFF\n\0\0\0WEBPVP8 ", "image/webp"),
    ],
)  # fmt: skip
def test_an_image_is_sent_as_what_it_is(data: bytes, media_type: str, claimed: Any) -> None:
    """Invariant 14: the type that a result claims may be one that the endpoint refuses."""
    calls = completion(None, tool_call("picture", {}))
    with serving(calls, completion("nice")) as endpoint:
        Played(endpoint, images=True, pictures=[image(data, claimed)])
    (part,) = endpoint.requests[1]["messages"][-1]["content"][1:]
    assert part["image_url"]["url"].startswith(f"data:{media_type};base64,")


# --- failures of the model ------------------------------------------------------------------------

ACTS = completion(None, tool_call("add", {"a": 1}))
UNREADABLE = refusal(400, "cannot identify image file")
FAILURES = {
    "400": (UNREADABLE, ConfigError),
    "422": (refusal(422, "invalid"), ConfigError),
    "403": (refusal(403, "blocked by a firewall"), Forbidden),
    "500": (refusal(500, "oops"), EndpointUnavailable),
    "dies": (dies, EndpointUnavailable),
    "nonsense": (body({"choices": []}), EndpointUnavailable),
}


@pytest.mark.parametrize(("failure", "_"), FAILURES.values(), ids=FAILURES)
def test_a_result_at_which_the_model_fails_does_not_void_the_episode(
    failure: Answer, _: type[Exception]
) -> None:
    """Invariant 14: an agent can choose it. The answer to our own request is paid for."""
    log = EpisodeLog()
    with (
        serving(ACTS, failure, completion("Hello.", usage=(7, 3)), failure) as endpoint,
        pytest.raises(ConversationRefused, match="answers its opening: the model endpoint"),
    ):
        Played(endpoint, log=log, attempts=1, prices=(1e6, 1e6))
    opening, played, own, again = endpoint.requests
    assert again == played
    assert len(own["messages"]) == len(opening["messages"]) == 2
    assert own["messages"][1]["content"].startswith("Add 1.\n\n[")
    assert own["tools"] == opening["tools"]
    assert log.usage == Usage(requests=2, prompt_tokens=17, completion_tokens=8, cost=25.0)
    assert "Hello." not in str(log.messages)


@pytest.mark.parametrize(("failure", "error"), FAILURES.values(), ids=FAILURES)
def test_a_model_that_answers_nothing_voids_the_episode(
    failure: Answer, error: type[Exception]
) -> None:
    """Invariant 2: the model fails, whatever it is asked."""
    with serving(ACTS, failure) as endpoint, pytest.raises(error):
        Played(endpoint, attempts=1)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(("failure", "error"), FAILURES.values(), ids=FAILURES)
def test_a_failure_at_the_opening_is_the_models(failure: Answer, error: type[Exception]) -> None:
    """Nothing in it is an agent's."""
    with serving(failure) as endpoint, pytest.raises(error):
        Played(endpoint, attempts=1)
    assert len(endpoint.requests) == 1


def test_an_episode_continues_once_the_model_works_again() -> None:
    with serving(ACTS, refusal(503, "restarts"), completion("Hi."), completion("2")) as endpoint:
        played = Played(endpoint, attempts=1)
    assert played.output == {"stop": "answered", "turns": 2, "text": "2"}
    assert played.log.usage == Usage(requests=3, prompt_tokens=30, completion_tokens=15)


def test_no_cache_answers_the_models_check() -> None:
    """Invariant 2: a proxy may answer a request that it knows although the model is away."""
    asked = []
    for _ in range(2):
        with (
            serving(ACTS, UNREADABLE, completion("Hi."), UNREADABLE) as endpoint,
            pytest.raises(ConversationRefused),
        ):
            Played(endpoint)
        asked += [endpoint.requests[n]["messages"] for n in (0, 2)]
    assert asked[0] == asked[2]
    assert len({json.dumps(one) for one in asked}) == 3


def test_a_limit_of_requests_is_not_a_result_at_which_the_model_fails() -> None:
    """Invariant 2: it depends on what others ask; but not a limit that one request exceeds."""
    with (
        serving(ACTS, refusal(429, "slow down"), completion("Hi.")) as endpoint,
        pytest.raises(EndpointUnavailable),
    ):
        Played(endpoint, attempts=1)
    assert len(endpoint.requests) == 2
    large = refusal(429, "Request too large for m: Limit 30000, Requested 37000.")
    with serving(ACTS, large) as endpoint:
        assert Played(endpoint).output["stop"] == "context_full"


@pytest.mark.parametrize(
    ("failure", "stop"),
    [
        (refusal(400, "maximum context length is 10 tokens"), "context_full"),
        (refusal(413, "payload too large"), "context_full"),
        (refusal(400, "content_filter"), "refused"),
    ],
)
def test_a_conversation_that_grew_too_long_is_scored(failure: Answer, stop: str) -> None:
    with serving(ACTS, failure) as endpoint:
        assert Played(endpoint).output["stop"] == stop
    assert len(endpoint.requests) == 2


# --- prompts and options --------------------------------------------------------------------------


def test_prompts_are_templates_over_the_tasks_fields() -> None:
    with serving(completion("ok")) as endpoint:
        Played(endpoint, system="", prompt='{id}: {instruction} {level.name} {level} {{x}} {"y"}')
    (message,) = endpoint.requests[0]["messages"]
    assert message["content"] == 't1: Add 1. easy {"name": "easy", "n": 2} {x} {"y"}'
    with pytest.raises(ConfigError, match=r"'t1' has no field 'level\.colour'"):
        rendered("{level.colour}", TASK)


def test_a_task_with_images_can_be_in_a_prompt() -> None:
    """Multimodal data sets have bytes in their rows."""
    task = Task.model_validate({"id": "a", "instruction": "Look.", "images": [{"bytes": b"\xff"}]})
    assert rendered("{instruction} {images}", task) == 'Look. [{"bytes": "b\'\\\\xff\'"}]'


def test_invalid_options_are_refused_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        {"max_turns": 0}, {"max_cost": -1.0}, {"max_cost": 1.0}, {"max_trun": 1},
        {"base_url": "ftp://x"}, {"timeout_s": 0}, {"attempts": 0}, {"api_key_env": "NO_SUCH_KEY"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            OpenAIPolicy("m", **{"base_url": "http://localhost/v1", **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        OpenAIPolicy("m")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert "localhost:8000" in repr(OpenAIPolicy("m"))


def test_a_policy_brings_its_key_to_runners_without_showing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 10."""
    monkeypatch.setenv("MY_KEY", "sk-mine")
    with serving(completion("ok")) as endpoint:
        policy = OpenAIPolicy("m", base_url=endpoint.url, api_key_env="MY_KEY")
        monkeypatch.delenv("MY_KEY")
        data = base.portable(policy)
        assert data is not None
        again = pickle.loads(data)
        env = EpisodeEnv(FakeInstance(), EpisodeLog())  # type: ignore[arg-type]
        asyncio.run(again(env, TASK))
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-mine"
    assert "sk-mine" not in f"{policy!r}{vars(policy)}"
