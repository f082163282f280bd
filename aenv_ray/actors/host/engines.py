"""The engines of one host, and the sandboxes that it still has to end."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import InstanceId

logger = logging.getLogger(__name__)

ADOPT_AGAIN_S: Final = 0.2

EngineFactory = Callable[[str], Engine]
"""Returns the engine with a given name; raises ConfigError for an unknown one."""


class HostEngines:
    """Engines by name, each created at its first use."""

    def __init__(self, make: EngineFactory) -> None:
        self._make = make
        self._engines: dict[str, Engine] = {}
        self._owed: dict[InstanceId, str] = {}
        """Engines by sandboxes that are to end and are not gone."""
        self._stopping: set[InstanceId] = set()
        """The sandboxes that an engine is ending now."""

    def get(self, name: str) -> Engine:
        """Return an engine.

        Raises:
            ConfigError: The name is unknown.
        """
        if name not in self._engines:
            self._engines[name] = self._make(name)
        return self._engines[name]

    async def attach(self, name: str, instance_id: InstanceId, deadline: float) -> Sandbox:
        """Connect to a sandbox of an earlier host; retry while the engine does not answer.

        Args:
            name: The engine.
            instance_id: The instance of the sandbox.
            deadline: Until when to retry, on the loop's clock; tried at least once.

        Raises:
            SandboxLost: The sandbox no longer runs.
            FabricUnavailable: The deadline passed. The sandbox may be running; `stop` it.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self.get(name).attach(instance_id)
            except FabricUnavailable:
                if loop.time() + ADOPT_AGAIN_S >= deadline:
                    raise
            await asyncio.sleep(ADOPT_AGAIN_S)

    async def logs(
        self, name: str, instance_id: InstanceId, tail_lines: int | None, follow: bool
    ) -> AsyncGenerator[str, None]:
        """Yield the output of a sandbox as text; see `Engine.logs`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = self.get(name).logs(instance_id, tail_lines=tail_lines, follow=follow)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)

    def pods(self) -> Counter[str]:
        """Return how many pods the engines have, by phase."""
        found: Counter[str] = Counter()
        for engine in self._engines.values():
            found.update(engine.pods())
        return found

    async def stop(self, name: str, instance_ids: Sequence[InstanceId]) -> None:
        """End sandboxes; on failure they stay noted for `stop_owed`.

        Raises:
            AenvError: The engine could not confirm that they are gone.
        """
        self.owe(name, instance_ids)
        self._stopping.update(instance_ids)
        try:
            await self.get(name).stop(instance_ids)
        finally:
            self._stopping.difference_update(instance_ids)
        for instance_id in instance_ids:
            self._owed.pop(instance_id, None)

    def remote_engines(self) -> set[str]:
        """Return the names of the engines in use whose sandboxes start on other machines."""
        return {n for n, each in self._engines.items() if each.capabilities.starts_elsewhere}

    def ending(self) -> int:
        """Return how many sandboxes are to end and not gone yet."""
        return len(self._owed) + sum(engine.ending() for engine in self._engines.values())

    def owe(self, name: str, instance_ids: Sequence[InstanceId]) -> None:
        """Note sandboxes that are to end, for `stop_owed` if nothing else stops them."""
        self._owed |= dict.fromkeys(instance_ids, name)

    async def stop_owed(self) -> None:
        """Retry to end the sandboxes that could not be ended before."""
        owed = {i: name for i, name in self._owed.items() if i not in self._stopping}
        for name in set(owed.values()):
            ids = [i for i, engine in owed.items() if engine == name]
            try:
                await self.stop(name, ids)
            except AenvError as exc:
                logger.warning("%d sandboxes are still to be ended: %s", len(ids), exc)

    async def close(self) -> None:
        """Disconnect; the sandboxes run on for the next host with this id."""
        for engine in self._engines.values():
            await engine.close()
