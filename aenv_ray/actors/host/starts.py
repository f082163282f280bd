"""How a host starts sandboxes: grouped by engine, each with the record that a later host needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.clock import Clock
from aenv_ray.engines.base import Sandbox, SandboxSpec
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord, InstanceSpec

OnMade = Callable[[InstanceRecord, Sandbox], None]
"""Takes over a sandbox that runs; the record is not in the store yet."""


class HostStarts:
    """Starts sandboxes on one host's engines.

    Args:
        host_id: The host's.
        node_id: Where it runs.
        density: What it holds.
        engines: Which make them.
        projects: On its node.
        clock: For deadlines.
        will_use: Awaited with ``(host id, engine)`` before anything is made there.
    """

    def __init__(
        self,
        host_id: HostId,
        node_id: str,
        density: ActorDensity,
        engines: HostEngines,
        projects: HostProjects,
        clock: Clock,
        will_use: Callable[[HostId, str], Awaitable[None]],
    ) -> None:
        self._host_id = host_id
        self._node_id = node_id
        self._density = density
        self._engines = engines
        self._projects = projects
        self._clock = clock
        self._will_use = will_use

    async def start(
        self, specs: Sequence[InstanceSpec], on_made: OnMade, *, is_pooled: bool = False
    ) -> dict[InstanceId, AenvError]:
        """Make sandboxes and wait until each answers calls or has failed.

        Args:
            specs: Distinct instance ids.
            on_made: Told of each that runs.
            is_pooled: Nobody has them yet.

        Returns:
            Why the others do not run.

        Raises:
            FabricUnavailable: The node cannot make sandboxes.
        """
        by_engine: dict[str, list[tuple[InstanceSpec, SandboxSpec]]] = {}
        failures: dict[InstanceId, AenvError] = {}
        now = self._clock.now()
        for spec in specs:
            try:
                sandbox_spec = self._projects.sandbox_spec(spec, now)
                engine = self._engines.get(spec.engine)
                if spec.storage is not None and not engine.capabilities.storage:
                    raise ConfigError(
                        f"the {spec.engine} engine has no storage that outlives a sandbox",
                        hint="engines with storage: process, docker, kubernetes",
                    )
            except AenvError as exc:
                failures[spec.instance_id] = exc
                continue
            by_engine.setdefault(spec.engine, []).append((spec, sandbox_spec))
        for name, pairs in by_engine.items():
            await self._will_use(self._host_id, name)
            outcomes = await self._engines.get(name).start_many([s for _, s in pairs])
            for (spec, sandbox_spec), outcome in zip(pairs, outcomes, strict=True):
                if isinstance(outcome, AenvError):
                    failures[spec.instance_id] = outcome
                    continue
                record = InstanceRecord(
                    spec=spec, host_id=self._host_id, node_id=self._node_id,
                    density=self._density, created_at=now, deadline=sandbox_spec.deadline,
                    isolation=outcome.isolation, start_mode=outcome.start_mode,
                    is_pooled=is_pooled,
                )  # fmt: skip
                on_made(record, outcome)
        return failures
