"""Environments as resources servers of NeMo Gym.

``app.py`` of a resources server:

    from aenv_ray.integrations.nemo_gym import AenvResourcesServer

    if __name__ == "__main__":
        AenvResourcesServer.run_webserver()

Its configuration names the environment. A row of the dataset has the task of the episode under
``verifier_metadata.aenv``; its ``responses_create_params.tools`` are those of `response_tools`. The
tools are routes of the server, each session has an episode, and ``/verify`` ends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodePool, LiveEpisode
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import EnvironmentTools, framework_tools, model_text

require(
    "nemo-gym", "nemo-gym", "0.3", "1",  # the extra is empty for earlier Pythons
    way_out="pip install 'aenv-ray[nemo-gym]' with Python 3.12 or later",
)  # fmt: skip

from fastapi import FastAPI, Request, Response  # noqa: E402
from nemo_gym.base_resources_server import (  # noqa: E402
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY  # noqa: E402
from pydantic import ConfigDict, Field, PrivateAttr  # noqa: E402

ROW: Final = "aenv"
"""Key of the task in ``verifier_metadata``."""
_FAILED: Final = 422
_OVER: Final = 503


class AenvResourcesServerConfig(BaseResourcesServerConfig):
    """Which environment the sessions play."""

    environment: str
    """``name@version``, ``name``, or the path of a project."""
    only: list[str] | None = None
    """Names of the tools to offer. None: all."""
    timeout_s: float | None = None
    """Timeout of a call. None: 60."""
    pool: dict[str, Any] = Field(default_factory=dict)
    """Options of the `EpisodePool`."""


class AenvSeedSessionRequest(BaseSeedSessionRequest):
    """A row of the dataset."""

    model_config = ConfigDict(extra="allow")
    verifier_metadata: dict[str, Any] | None = None


class AenvVerifyRequest(BaseVerifyRequest):
    """A row with the answer of the model."""

    model_config = ConfigDict(extra="allow")


class AenvVerifyResponse(BaseVerifyResponse):
    """How the episode ended."""

    model_config = ConfigDict(extra="allow")
    void: bool = False
    """Nothing can be learned from it, and its reward means nothing: leave it out."""
    status: str = ""
    """Status of the episode, as in its record."""


class AenvResourcesServer(SimpleResourcesServer):
    """Plays an episode for each session."""

    config: AenvResourcesServerConfig
    _pool: EpisodePool = PrivateAttr()
    _playing: dict[str, tuple[LiveEpisode, EnvironmentTools]] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Make the pool, which connects to Ray when it is first used."""
        super().model_post_init(context)
        self._pool = EpisodePool(self.config.environment, **self.config.pool)

    def setup_webserver(self) -> FastAPI:
        """Return the application, with a route for each tool."""
        app: FastAPI = super().setup_webserver()
        app.post("/{tool_name}")(self.call_tool)  # after the routes of NeMo Gym
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(served: FastAPI) -> AsyncIterator[Any]:
            try:
                async with inner(served) as state:
                    yield state
            finally:
                await asyncio.to_thread(self._pool.close)

        app.router.lifespan_context = lifespan
        return app

    async def seed_session(
        self, request: Request, body: AenvSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        """Begin the episode of a session; one that it has not ended is abandoned.

        Raises:
            ConfigError: The task is wrong, `only` names a tool that the environment lacks, or a
                schema contains itself.
            AenvError: The environment does not exist, or Ray cannot be reached.
        """
        session = request.session[SESSION_ID_KEY]
        earlier = self._playing.pop(session, None)
        if earlier is not None:
            await earlier[0].abandon()
        task = dict((body.verifier_metadata or {}).get(ROW) or {})
        episode = await self._pool.begin(task)
        tools = EnvironmentTools(episode, only=self.config.only, timeout_s=self.config.timeout_s)
        self._playing[session] = episode, tools
        try:
            await tools.load()
        except ConfigError:
            raise
        except AenvError:
            pass  # it has ended: calls and /verify say so
        return BaseSeedSessionResponse()

    async def call_tool(self, tool_name: str, request: Request) -> Response:
        """Call a tool for the model; a failure is a text for it, with an HTTP status."""
        playing = self._playing.get(request.session.get(SESSION_ID_KEY, ""))
        if playing is None:
            return _text("there is no episode: call /seed_session first", _FAILED)
        try:
            given = json.loads(await request.body() or b"{}")
            result = await playing[1].call(tool_name, given)
        except ValueError as exc:
            return _text(f"the arguments are no JSON: {exc}", _FAILED)
        except AenvError as exc:
            return _text(f"the episode has ended: {exc.message}", _OVER)
        return _text(model_text(result), _FAILED if result.is_error else 200)

    async def verify(self, request: Request, body: AenvVerifyRequest) -> AenvVerifyResponse:
        """End the episode of a session, and return its reward.

        Raises:
            ConfigError: The session has none.
        """
        playing = self._playing.pop(request.session.get(SESSION_ID_KEY, ""), None)
        if playing is None:
            raise ConfigError(
                "/verify: the session has no episode", hint="send the cookie of /seed_session"
            )
        outcome = await playing[0].finish()
        record = outcome.episode
        return AenvVerifyResponse(
            **body.model_dump(), reward=outcome.reward or 0.0, void=outcome.is_void,
            status=record.status.value,
        )  # fmt: skip


def _text(text: str, status: int) -> Response:
    return Response(text, status, media_type="text/plain")


def response_tools(
    environment: str | Path, *, only: Collection[str] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Return the tools of an environment for rows' ``responses_create_params.tools``.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        only: Names of the tools to offer. None: all.
        options: Options of the `EpisodePool` whose instance is asked.

    Raises:
        ConfigError: `only` names a tool that the environment lacks, or a name is one of a route of
            NeMo Gym.
    """
    with EpisodePool(environment, **options) as pool:
        listed: list[Mapping[str, Any]] = list(pool.list_tools())
        tools = framework_tools(listed, pool.env_name, only=only)
    for tool in tools:
        if tool.name in {"seed_session", "verify", "aggregate_metrics"}:
            raise ConfigError(
                f"tool {tool.own_name!r} has the name of a route of NeMo Gym",
                hint="leave it out with only=…",
            )
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": False,
        }
        for tool in tools
    ]
