"""OpenEnv: one local server, in which each WebSocket session has an environment."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from protocol import Peer, ended, listening, python, run

HOST, PORT = "127.0.0.1", 18765


class EchoAction(Action):
    """What to echo."""

    text: str


class EchoObservation(Observation):
    """What was echoed."""

    text: str = ""


class Echo(Environment):
    """Returns what it is given."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: Any = None, episode_id: Any = None, **given: Any) -> EchoObservation:
        """Begin an episode."""
        return EchoObservation()

    def step(self, action: Any, timeout_s: Any = None, **given: Any) -> EchoObservation:
        """Echo."""
        return EchoObservation(text=action.text)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


class OpenEnv(Peer):
    """See `Peer`. A session answers one step at a time."""

    async def open(self) -> None:
        self._server = await asyncio.create_subprocess_exec(python(), __file__, "serve")
        await listening(HOST, PORT)

    async def create(self) -> Any:
        client = GenericEnvClient(base_url=f"http://{HOST}:{PORT}")
        await client.connect()
        await client.reset()
        return client, asyncio.Lock()

    async def call(self, env: Any) -> None:
        client, lock = env
        async with lock:
            result = await client.step({"text": "hi"})
        assert result.observation["text"] == "hi"

    async def release(self, env: Any) -> None:
        await env[0].close()

    async def close(self) -> None:
        await ended(self._server)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=4096)
        uvicorn.run(app, host=HOST, port=PORT, log_level="warning")
    else:
        run(OpenEnv())
