"""Why a connection to a sandbox broke."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.engines.base import EndCause
from aenv_ray.engines.process import engine
from aenv_ray.engines.process.engine import ProcessEngine
from aenv_ray.errors import InsideCause
from aenv_ray.ids import InstanceId

SHORT = "the node had only 100 MiB of memory left"


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        ({"cause": SHORT, "inside": None, "log": ""}, EndCause(SHORT)),
        ({"cause": "m", "inside": "memory", "log": ""}, EndCause("m", InsideCause.MEMORY)),
    ],
)
async def test_a_process_that_its_launcher_ends_did_not_close_its_connection(
    ended: dict[str, Any], cause: EndCause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2: on a node without memory, the kernel needs seconds to free that of a process."""
    monkeypatch.setattr(engine, "CAUSE_WAIT_S", 0.0)

    async def ask(*_: Any, **__: Any) -> dict[str, Any]:
        return {"instance": {"id": "i-1"}, "ended": ended}

    host: Any = SimpleNamespace(_launcher=SimpleNamespace(ask=ask))
    never: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
    assert await ProcessEngine._find_cause(host, InstanceId("i-1"), never) == cause
