"""Ray: one plain async actor for each environment."""

from __future__ import annotations

from typing import Any

import ray
from protocol import Peer, run


@ray.remote(num_cpus=0, max_concurrency=1000)
class Echo:
    """Returns what it is given."""

    async def echo(self, text: str) -> str:
        """Return `text`."""
        return text


class RayActor(Peer):
    """See `Peer`."""

    async def open(self) -> None:
        ray.init(include_dashboard=False, logging_level="error")

    async def create(self) -> Any:
        return Echo.remote()

    async def call(self, env: Any) -> None:
        assert await env.echo.remote("hi") == "hi"

    async def release(self, env: Any) -> None:
        ray.kill(env)

    async def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    run(RayActor())
