"""verifiers: its local runtime, in which each call is a process."""

from __future__ import annotations

from typing import Any

from protocol import Peer, run
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime


class Verifiers(Peer):
    """See `Peer`."""

    async def create(self) -> Any:
        runtime = SubprocessRuntime(SubprocessConfig())
        await runtime.start()
        return runtime

    async def call(self, env: Any) -> None:
        result = await env.run(["echo", "hi"], {})
        assert result.stdout.strip() == "hi"

    async def release(self, env: Any) -> None:
        await env.stop()


if __name__ == "__main__":
    run(Verifiers())
