"""SWE-ReX: a local deployment with a bash session for each environment."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from protocol import Peer, run
from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

logging.disable(logging.WARNING)


class SweRex(Peer):
    """See `Peer`. A session runs one command at a time."""

    async def create(self) -> Any:
        deployment = LocalDeployment()
        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=30.0))
        return deployment, asyncio.Lock()

    async def call(self, env: Any) -> None:
        deployment, lock = env
        async with lock:
            result = await deployment.runtime.run_in_session(BashAction(command="echo hi"))
        assert result.output.strip() == "hi"

    async def release(self, env: Any) -> None:
        await env[0].stop()


if __name__ == "__main__":
    run(SweRex())
