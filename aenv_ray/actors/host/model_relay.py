"""Forwards chat requests of environments to the operator's endpoint, within limits.

The endpoint's address, the model's name and the key stay in this process. Requests of a sandbox are
checked: only known fields are forwarded, and size, tokens and number of requests are limited.

An agent may have caused a request that fails, by its size, its content or its timeout, and must not
void its episode by that (invariant 14). So after a failure the host sends a short request of its
own. Only if that fails too, the endpoint has failed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.chat_endpoint import RequestFailed, content_of, new_client, refusal_of
from aenv_ray.config import Settings, secret
from aenv_ray.errors import (
    ConfigError,
    EndpointUnavailable,
    PolicyRefused,
    ToolTimeout,
)
from aenv_ray.ids import InstanceId
from aenv_ray.validation import problems_of

MAX_TIMEOUT_S: Final = 300.0
MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
CONCURRENT: Final = 64
"""Requests that a host sends to the endpoint at a time; others wait, within their timeout."""
CONCURRENT_OF_INSTANCE: Final = 4
ATTEMPTS: Final = 4
_OWN_REQUEST: Final = {"messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 1}
_OWN_REQUEST_S: Final = 10.0
"""Less than the time for which the runtime waits beyond its timeout for an answer."""


class ChatRequest(BaseModel):
    """What environment code may send; the operator chooses the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None


@dataclass
class _Account:
    """What one instance has used."""

    requests: int = 0
    tokens: int = 0
    running: int = 0


class ModelRelay:
    """The chat model of a host's instances. One event loop.

    Args:
        given: The settings of this process: endpoint, model, key and limits.
        http: HTTP client, for tests. None: a new client, at the first request.
    """

    def __init__(self, given: Settings, http: httpx.AsyncClient | None = None) -> None:
        self._given = given
        self._http = http
        self._accounts: dict[InstanceId, _Account] = {}
        self._free = asyncio.Semaphore(CONCURRENT)

    def forget(self, instance_id: InstanceId) -> None:
        """Forget what an instance that has ended used."""
        self._accounts.pop(instance_id, None)

    def check_key(self) -> None:
        """Check the key, before a sandbox starts that may ask.

        Raises:
            ConfigError: The operator names a variable for the key, and it is not set.
        """
        given = self._given
        name = given.chat_model_key_env
        is_named = "chat_model_key_env" in given.model_fields_set
        if given.chat_model_url and given.chat_model and is_named and not secret(name):
            raise ConfigError(
                f"AENV_CHAT_MODEL_KEY_ENV names {name}, which is not set on this node",
                hint=f"start the node with {name} set to the key of the endpoint, or unset "
                "AENV_CHAT_MODEL_KEY_ENV if the endpoint needs none",
            )

    async def answer(self, instance_id: InstanceId, params: dict[str, Any]) -> bytes:
        """Return the endpoint's answer as JSON.

        Empty `params` only ask whether this node has a model; the answer is then ``{}``.

        Raises:
            ConfigError: This node has no endpoint, or the request is malformed or refused.
            PolicyRefused: The instance has reached a limit.
            EndpointUnavailable: The endpoint failed several times, or did not answer in time, and a
                request of the host failed as well.
            ToolTimeout: There was no answer in time, but the endpoint works.
            ConfigError: The endpoint fails at this request, but works.
        """
        url, model = self._given.chat_model_url, self._given.chat_model
        if not url or not model:
            raise ConfigError(
                "this node has no chat model for environments",
                hint="have the operator set AENV_CHAT_MODEL_URL and AENV_CHAT_MODEL",
            )
        if not params:
            return b"{}"
        body = self._body(params.get("body"), model)
        timeout_s = params.get("timeout_s")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"invalid timeout {timeout_s!r}: expected a number of seconds above 0, at most "
                f"{MAX_TIMEOUT_S:g}",
                hint="leave the timeout out for the default",
            )
        account = self._accounts.setdefault(instance_id, _Account())
        self._charge(account, instance_id)
        account.running += 1
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._asked(url, body, account)
            except TimeoutError:
                words = f"the chat model of {instance_id} did not answer within {timeout_s:g} s"
                if not await self._works(url, model):
                    raise EndpointUnavailable(
                        f"{words}, and did not answer a test request of the host either",
                        hint="have the operator check the server at AENV_CHAT_MODEL_URL",
                    ) from None
                raise ToolTimeout(
                    words, hint="raise the timeout of the request, or shorten the conversation"
                ) from None
            except EndpointUnavailable as exc:
                if not await self._works(url, model):
                    raise
                raise ConfigError(
                    f"{exc.message}. It answers other requests",
                    hint="shorten or correct the request",
                ) from exc
        finally:
            account.running -= 1

    async def _works(self, url: str, model: str) -> bool:
        """Return whether the endpoint answers a request of the host."""
        body = pydantic_core.to_json({**_OWN_REQUEST, "model": model})
        try:
            async with asyncio.timeout(_OWN_REQUEST_S):
                await self._sent(url, body, _Account())
        except (TimeoutError, RequestFailed):
            return False
        except ConfigError:  # any answer, a refusal too, shows that it works
            return True
        return True

    def _body(self, wanted: Any, model: str) -> bytes:
        try:
            request = ChatRequest.model_validate(wanted)
        except ValidationError as exc:
            raise ConfigError(
                f"malformed chat request: {problems_of(exc)}",
                hint="send a body of the chat completions API: a list of messages and its options",
            ) from None
        fields = {**request.model_dump(exclude_none=True), "model": model}
        body = pydantic_core.to_json(fields)
        if len(body) > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"a chat request has {len(body)} bytes; the limit is {MAX_REQUEST_BYTES}",
                hint="shorten the conversation, for example by dropping old tool results",
            )
        return body

    def _charge(self, account: _Account, instance_id: InstanceId) -> None:
        """Count a request.

        Raises:
            PolicyRefused: It would exceed a limit of the instance.
        """
        given = self._given
        for used, most, what, setting in (
            (account.requests, given.chat_model_max_requests, "requests", "MAX_REQUESTS"),
            (account.tokens, given.chat_model_max_tokens, "tokens", "MAX_TOKENS"),
            (account.running, CONCURRENT_OF_INSTANCE, "concurrent requests", ""),
        ):
            if used >= most:
                hint = "wait until one of them has ended"
                if setting:
                    hint = f"have the operator raise AENV_CHAT_MODEL_{setting}"
                raise PolicyRefused(
                    f"{instance_id} has reached its limit of {most} {what} to the chat model",
                    hint=hint,
                )
        account.requests += 1

    async def _asked(self, url: str, body: bytes, account: _Account) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._free:
                    return await self._sent(url, body, account)
            except RequestFailed as exc:
                pause_s = exc.pause_s(attempt)
                if attempt == ATTEMPTS:
                    raise EndpointUnavailable(
                        f"the chat model for environments failed {attempt} times: {exc}",
                        hint="have the operator check the server at AENV_CHAT_MODEL_URL",
                    ) from None
            await asyncio.sleep(pause_s)
        raise AssertionError("not reached: the last attempt raises")

    async def _sent(self, url: str, body: bytes, account: _Account) -> bytes:
        headers = {"Content-Type": "application/json"}
        key = secret(self._given.chat_model_key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if self._http is None:
            self._http = new_client(url)
        target = f"{url.rstrip('/')}/chat/completions"
        try:
            async with self._http.stream("POST", target, content=body, headers=headers) as response:
                content = await content_of(response, MAX_ANSWER_BYTES)
        except httpx.HTTPError as exc:
            raise RequestFailed(type(exc).__name__) from None
        if response.status_code != 200:
            said = refusal_of(response, content, key)
            raise ConfigError(
                f"the chat model for environments answered {said}",
                hint="shorten or correct the request; if every request fails, have the operator "
                f"check AENV_CHAT_MODEL and the key in {self._given.chat_model_key_env}",
            )
        return _completion(content, account)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()


def _completion(content: bytes, account: _Account) -> bytes:
    """Return the part of an answer that the environment gets, and count its tokens.

    Raises:
        RequestFailed: It is not a chat completion.
    """
    try:
        answer = pydantic_core.from_json(content)
        choice = answer["choices"][0]
        message = choice["message"]
        usage = answer.get("usage") or {}
        account.tokens += int(usage.get("total_tokens") or 0) or len(content) // 4
        shown = {"role": "assistant", "content": message.get("content")}
        if message.get("tool_calls"):
            shown["tool_calls"] = message["tool_calls"]
        kept = {"message": shown, "finish_reason": choice.get("finish_reason")}
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise RequestFailed(f"the answer is not a chat completion ({type(exc).__name__})") from None
    return pydantic_core.to_json(
        {"choices": [kept], "usage": usage, "model": answer.get("model") or ""}
    )
