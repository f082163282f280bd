"""The floors: the same work on bare Ray."""

from __future__ import annotations

from typing import Any

import ray


@ray.remote(num_cpus=0, max_concurrency=1000, enable_task_events=False)
class BareActor:
    """An async actor that returns its argument."""

    async def echo(self, value: Any) -> Any:
        """Return `value`."""
        return value


def bare_actor() -> Any:
    """Return a bare actor that has answered once."""
    actor = BareActor.remote()
    ray.get(actor.echo.remote(None))
    return actor
