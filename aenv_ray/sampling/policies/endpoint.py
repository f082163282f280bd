"""One OpenAI-compatible endpoint over HTTP: requests, retries, streams, and what failures mean."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from pydantic import SecretStr

import aenv_ray
from aenv_ray.chat_endpoint import (
    LONGEST_PAUSE_S,
    RequestFailed,
    chunks_of,
    content_of,
    new_client,
    quoted,
    refusal_of,
)
from aenv_ray.client.gateway_http import parse_url
from aenv_ray.errors import ConfigError, EndpointUnavailable, Forbidden, Unauthorized
from aenv_ray.sampling.policies.chat import ContextFull, EndpointLimited, Filtered
from aenv_ray.sampling.policies.completion import (
    Completion,
    ErrorAnswer,
    InvalidAnswer,
    StreamedCompletion,
    read_completion,
)

logger = logging.getLogger("aenv_ray")

OPENAI_URL: Final = "https://api.openai.com/v1"
TIMEOUT_S: Final = 300.0
ATTEMPTS: Final = 6
_WARN_EVERY_S: Final = 30.0
_LIMIT_BYTES: Final = 64 * 2**20
"""Longest answer that is read."""
_PORTS: Final = {"http": "", "https": ""}
_TOO_LONG: Final = (
    "context_length", "context length", "context window", "context size", "context limit",
    "context_exceeded", "maximum context", "maximum model length", "maximum prompt length",
    "maximum input length", "maximum number of tokens allowed", "model token limit",
    "too many tokens", "prompt is too long", "input is too long", "range of input length",
    "max_prompt_tokens", "string_above_max_length", "`inputs` must have less than",
    "`inputs` tokens + `max_new_tokens`",
)  # fmt: skip
"""How servers that refuse a request say that its conversation is too long: OpenAI, vLLM, SGLang,
llama.cpp, TGI, TensorRT-LLM, Anthropic, Gemini, Bedrock, xAI, Moonshot, DashScope and others."""
_OVERFLOWED: Final = (
    "context_length_exceeded", "maximum context length", "contextwindowexceeded",
    "context size has been exceeded", "exceed_context_size", "exceeds the available context size",
)  # fmt: skip
"""How servers say it with 5xx, such as llama.cpp when an answer fills the context. Only what cannot
mean a failure of the server itself: that voids the episode."""
_REQUEST_TOO_LARGE: Final = "request too large"
"""How OpenAI says, with 429, that a single request exceeds the limit of tokens per minute."""
_FILTERED: Final = ("content_filter", "content_policy", "content management policy")


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """An endpoint, and how it is asked.

    Attributes:
        model: The model's name there.
        base_url: URL up to and including ``/v1``.
        api_key: Sent as a bearer token; None sends none.
        stream: Ask for answers as streams, which keeps connections through slow answers alive.
        timeout_s: Limit for one answer, in seconds.
        attempts: How often a request is sent at most.
        request: Further fields of each request, for example ``{"temperature": 0.7}``.
    """

    model: str
    base_url: str = OPENAI_URL
    api_key: SecretStr | None = None
    stream: bool = False
    timeout_s: float = TIMEOUT_S
    attempts: int = ATTEMPTS
    request: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.attempts < 1:
            raise ConfigError(
                f"timeout_s and attempts must be positive, not {self.timeout_s!r} and "
                f"{self.attempts!r}",
                hint="leave them out for the defaults",
            )
        object.__setattr__(self, "base_url", parse_url(self.base_url, _PORTS))


class Endpoint:
    """Asks an endpoint, with one pool of connections; used on one event loop, and closed there."""

    def __init__(
        self,
        options: EndpointOptions,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._warn_from_s = 0.0
        self._key = None if options.api_key is None else options.api_key.get_secret_value()
        self._http = new_client(options.base_url)
        self._http.headers["User-Agent"] = f"aenv-ray/{aenv_ray.__version__}"
        if self._key is not None:
            self._http.headers["Authorization"] = f"Bearer {self._key}"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        is_check: bool = False,
    ) -> Completion:
        """Return the answer to a conversation; see `ChatModel.complete`.

        Requests are sent again, after growing pauses or those that the endpoint asks for, if the
        endpoint cannot be reached, limits requests, fails, or sends no complete answer in time.

        Raises:
            EndpointLimited: It limits requests, also with the last attempt.
            Unauthorized: The endpoint refuses the key; Forbidden likewise.
            ConfigError: It refuses the request, for example because it has no such model.
        """
        body = self._body(messages, tools)
        attempts = 1 if is_check else self._options.attempts
        for attempt in range(1, attempts + 1):
            try:
                return await self._answer(body)
            except RequestFailed as exc:
                pause_s = self._pause(exc, attempt, attempts)
                logger.debug("%s; asking again in %.1f s", exc, pause_s)
                self._warn(exc, attempt)
                await self._sleep(pause_s)
        raise AssertionError("not reached: the last attempt raises")

    def _warn(self, failed: RequestFailed, attempt: int) -> None:
        """Say now and then that requests fail, so that nobody wonders why no episode ends."""
        # A single failure is usual, such as a 429 or a connection that the server closed.
        if attempt > 1 and time.monotonic() >= self._warn_from_s:
            self._warn_from_s = time.monotonic() + _WARN_EVERY_S
            logger.warning(
                "the model endpoint %s failed: %s; it is asked again, up to %d times",
                self._options.base_url, failed, self._options.attempts,
            )  # fmt: skip

    def _pause(self, failed: RequestFailed, attempt: int, attempts: int) -> float:
        """Return the seconds before the next attempt.

        Raises:
            EndpointUnavailable: There is none.
        """
        options = self._options
        # A limit of a minute or two passes, and one of a day does not.
        patience_s = LONGEST_PAUSE_S * (attempts - attempt)
        if attempt >= attempts or failed.asked_pause_s > patience_s:
            asked = f", and asks for a pause of {failed.asked_pause_s:.0f} s"
            raise (EndpointLimited if failed.is_limited else EndpointUnavailable)(
                f"the model endpoint {options.base_url} failed {attempt} times: {failed}"
                + (asked if failed.asked_pause_s > patience_s else ""),
                hint="check that it runs and has capacity; raise its attempts or timeout_s, or "
                "lower the concurrency",
            ) from failed
        return failed.pause_s(attempt)

    def _body(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> bytes:
        options = self._options
        body: dict[str, Any] = {"model": options.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body | dict(options.request)).encode()

    async def _answer(self, body: bytes) -> Completion:
        """Send a request once.

        Raises:
            RequestFailed: It may be sent again.
        """
        options = self._options
        headers = {"Content-Type": "application/json"}
        url = f"{options.base_url}/chat/completions"
        try:
            async with (
                asyncio.timeout(options.timeout_s),
                self._http.stream("POST", url, content=body, headers=headers) as response,
            ):
                kind = response.headers.get("content-type", "")
                if response.status_code == 200 and kind.startswith("text/event-stream"):
                    return await _streamed(response)
                content = await content_of(response, _LIMIT_BYTES)
                if response.status_code != 200:
                    raise self._refusal(response, content)
                return read_completion(json.loads(content.decode(errors="replace")))
        except TimeoutError:
            raise RequestFailed(f"no complete answer within {options.timeout_s:g} s") from None
        except httpx.HTTPError as exc:
            raise RequestFailed(f"{type(exc).__name__}: {exc}") from exc
        except ErrorAnswer as exc:
            raise self._reported(exc.error) from exc
        except (InvalidAnswer, ValueError, RecursionError) as exc:
            raise RequestFailed(f"the answer is not a chat completion: {exc}") from exc

    def _refusal(self, response: httpx.Response, content: bytes) -> Exception:
        """Return the error for an answer that is not 200.

        Raises:
            RequestFailed: The request may be sent again.
        """
        status, options = response.status_code, self._options
        if (outcome := _outcome(status, content)) is not None:
            return outcome
        said = refusal_of(response, content, self._key)
        what = f"the model endpoint {options.base_url} answered {said}"
        if status == 401:
            return Unauthorized(what, hint="set its key in OPENAI_API_KEY, or in the variable of "
                                           "--api-key-env")  # fmt: skip
        if status == 403:
            return Forbidden(what, hint="check the key and the model: the key may not use it")
        return ConfigError(what, hint=f"check --base-url and the model's name {options.model!r}")

    def _reported(self, error: Any) -> Exception:
        """Return the error for an error that was sent with status 200, as one with its code.

        Raises:
            RequestFailed: The request may be sent again.
        """
        content = json.dumps(error, ensure_ascii=False).encode(errors="replace")
        code = _code_of(error)
        if code is not None:
            return self._refusal(httpx.Response(code), content)
        if (outcome := _outcome(400, content)) is not None:
            return outcome
        raise RequestFailed(f"the answer is an error: {quoted(content, self._key)}")


def _outcome(status: int, content: bytes) -> ContextFull | Filtered | None:
    """Return what an answer with an error says of the conversation; None if it says nothing."""
    lowered = content.decode(errors="replace").lower()

    def says(phrases: Sequence[str]) -> bool:
        return any(phrase in lowered for phrase in phrases)

    if status == 429 and _REQUEST_TOO_LARGE in lowered:
        return ContextFull("the request alone exceeds the limit of tokens per minute")
    is_refused = status in {400, 413, 422}
    if status == 413 or (is_refused and says(_TOO_LONG)) or (status >= 500 and says(_OVERFLOWED)):
        return ContextFull("the conversation is too long")
    if is_refused and says(_FILTERED):
        return Filtered("a filter refuses the conversation")
    return None


def _code_of(error: Any) -> int | None:
    """Return the HTTP status that an error names as its code; None if it names none."""
    code = str(error.get("code")) if isinstance(error, Mapping) else ""
    return int(code) if re.fullmatch(r"[45]\d\d", code, re.ASCII) else None


async def _streamed(response: httpx.Response) -> Completion:
    """Read a stream of server-sent events up to ``[DONE]`` or its end."""
    answer = StreamedCompletion()
    rest = b""
    async for chunk in chunks_of(response, _LIMIT_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name == b"error":  # llama.cpp has sent errors under this name
                raise ErrorAnswer(json.loads(data))
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return answer.finished()
            answer.add(json.loads(data))
    return answer.finished()
