"""`OpenAIPolicy`: a model behind an OpenAI-compatible endpoint plays the episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import SecretStr

from aenv_ray.config import secret
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.episode_env import EpisodeEnv
from aenv_ray.sampling.policies.base import AgentPolicy, ForRunner, opened
from aenv_ray.sampling.policies.chat import ChatOptions, chat_options, play
from aenv_ray.sampling.policies.endpoint import (
    ATTEMPTS,
    OPENAI_URL,
    TIMEOUT_S,
    Endpoint,
    EndpointOptions,
)
from aenv_ray.trajectories.schema import Task

API_KEY_VARIABLE: Final = "OPENAI_API_KEY"


class OpenAIPolicy(ForRunner):
    """A model of an OpenAI-compatible endpoint, in a loop of tool calls.

    The key is read from the environment when the policy is created, and travels with the policy to
    runners. It is shown nowhere.

    Args:
        model: Name of the model.
        base_url: URL of the endpoint, for example ``http://localhost:8000/v1``. None:
            ``OPENAI_BASE_URL``, or else OpenAI's.
        api_key_env: Environment variable that holds the key.
        stream: Ask for answers as streams.
        timeout_s: Limit for one answer, in seconds.
        attempts: How often a request is sent at most.
        request: Further fields of each request, for example ``{"temperature": 0.7}``.
        options: The attributes of `ChatOptions`: prompts, limits, stop tools, images.

    Raises:
        ConfigError: The address is invalid, an option is unknown or out of range, or OpenAI's
            endpoint is asked without a key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str = API_KEY_VARIABLE,
        stream: bool = False,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        request: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        key = secret(api_key_env)
        url = base_url or secret("OPENAI_BASE_URL") or OPENAI_URL
        if key is None and (url == OPENAI_URL or api_key_env != API_KEY_VARIABLE):
            raise ConfigError(
                f"there is no API key in the environment variable {api_key_env}",
                hint="set it, name another one with --api-key-env, or give the address of an "
                "endpoint that needs none with --base-url",
            )
        if not model:
            raise ConfigError("the policy names no model", hint="write it as openai:MODEL")
        self.name = f"openai:{model}"
        """Its name in records."""
        self._endpoint = EndpointOptions(
            model=model,
            base_url=url,
            api_key=None if key is None else SecretStr(key),
            stream=stream,
            timeout_s=timeout_s,
            attempts=attempts,
            request=dict(request or {}),
        )
        self._options = chat_options("OpenAIPolicy", options)

    def __repr__(self) -> str:
        return f"OpenAIPolicy({self._endpoint.model!r}, base_url={self._endpoint.base_url!r})"

    def for_runner(self) -> AgentPolicy:
        """Return the policy with connections that all episodes of one runner share."""
        return ConnectedPolicy(self._endpoint, self._options)

    async def __call__(self, env: EpisodeEnv, task: Task) -> dict[str, Any]:
        """Play one episode with connections of its own."""
        async with opened(self) as connected:
            played: dict[str, Any] = await connected(env, task)
        return played


class ConnectedPolicy:
    """An `OpenAIPolicy` of one runner: its episodes share connections."""

    def __init__(self, endpoint: EndpointOptions, options: ChatOptions) -> None:
        self._options = options
        self._model = Endpoint(endpoint)

    async def __call__(self, env: EpisodeEnv, task: Task) -> dict[str, Any]:
        """Play an episode."""
        return await play(self._model, self._options, env, task)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._model.close()
