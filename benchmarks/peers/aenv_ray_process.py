"""aenv-ray: sandboxes of the process engine, in namespaces of their own, on shared hosts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import ray
from protocol import AT_ONCE, Peer, run

import aenv_ray
from aenv_ray.client.environment import Environment

PROJECT = Path(__file__).parent.parent / "echo_environment"
EPISODES = 1_000


async def act(env: Any, task: aenv_ray.sampling.Task) -> None:
    """Make one call."""
    del task
    await env.call_tool("echo", {"text": "hi"})


class AenvRay(Peer):
    """See `Peer`."""

    async def open(self) -> None:
        await asyncio.to_thread(aenv_ray.init)

    async def create(self) -> Any:
        env = Environment(str(PROJECT), actor="shared")
        await env.initialize()
        return env

    async def call(self, env: Any) -> None:
        result = await env.call_tool("echo", {"text": "hi"})
        assert result.data == "hi"

    async def release(self, env: Any) -> None:
        await env.release()

    async def burst(self, count: int) -> list[Any]:
        def started() -> list[_Handle]:
            handles = aenv_ray.create_many(PROJECT, count)
            ray.get([handle.call_tool.remote("echo", {"text": "hi"}) for handle in handles])
            return [_Handle(handle) for handle in handles]

        return list(await asyncio.to_thread(started))

    async def episodes_per_s(self) -> float:
        return await asyncio.to_thread(self._sampled)

    def _sampled(self) -> float:
        tasks = [{"id": f"t{n}"} for n in range(EPISODES)]
        sampling = aenv_ray.sample(PROJECT, act, tasks, concurrency=AT_ONCE, runners="nodes")
        finished = iter(sampling)
        next(finished)  # the runners have started
        started = time.perf_counter()
        for _ in finished:
            pass
        return (EPISODES - 1) / (time.perf_counter() - started)

    async def close(self) -> None:
        await asyncio.to_thread(aenv_ray.shutdown)


class _Handle:
    """Releases an instance of a burst."""

    def __init__(self, handle: aenv_ray.EnvHandle) -> None:
        self._handle = handle

    async def release(self) -> None:
        await self._handle.release.remote()


if __name__ == "__main__":
    run(AenvRay())
