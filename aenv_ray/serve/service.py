"""What is done with services, whoever asks: the gateway, Python code.

The hub keeps what a service should be, Serve makes it so and keeps it so.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from aenv_ray import ids, project, texts
from aenv_ray.actors import entrance, references
from aenv_ray.actors.create_options import chosen_engine
from aenv_ray.actors.hub_actor import ensure_hub
from aenv_ray.actors.remote_hub import blocking
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.services import Autoscale, ServiceRecord, ServiceRecords, check_name
from aenv_ray.project import Project
from aenv_ray.serve.service_apps import Apps, ServeApps, ServiceState, ServiceStatus, app_name

logger = logging.getLogger(__name__)

_MASK: Final = "***"
_SUFFIX_BYTES: Final = 3

Resolve = Callable[[str], Awaitable[Project]]


class Services:
    """Services of one cluster.

    Args:
        hub: Keeps the records.
        resolve: Finds projects.
        clock: For times.
        apps: Run them.
    """

    def __init__(self, hub: Hub, resolve: Resolve, clock: Clock, apps: Apps) -> None:
        self._apps = apps
        self.records = ServiceRecords(hub)
        self._resolve = resolve
        self._clock = clock

    async def create(
        self, reference: str, owner: str, *, name: str | None = None, wait: bool, **options: Any
    ) -> ServiceRecord:
        """Make a service.

        Args:
            reference: Its environment.
            owner: Whose it is.
            name: None: one is made up from the environment's.
            wait: Return once all replicas are healthy, instead of at once.
            options: Other fields of `ServiceRecord`.

        Raises:
            CatalogConflict: There is one of this name.
            ConfigError: The name or an option cannot be.
            EnvironmentNotFound: There is no such environment.
            FabricUnavailable: `wait`, and it did not become healthy; it is there all the same.
        """
        if name is not None:
            check_name(name)
        source = await self._resolve(reference)
        now = self._clock.now()
        record = _checked(
            source,
            id=name or _made_up(source.config.name), uid=secrets.token_hex(8),
            reference=_reference(reference, source), digest=source.digest, owner=owner,
            created_at=now, updated_at=now, **options,
        )  # fmt: skip
        await self.records.claim(record)
        await self._bring_up(record, wait=wait)
        return record

    async def update(
        self, record: ServiceRecord, *, wait: bool, reference: str | None = None, **changes: Any
    ) -> ServiceRecord:
        """Change a service. What needs other sandboxes rolls: new ones are healthy first.

        Args:
            record: As it is.
            wait: As for `create`.
            reference: Another version, or None.
            changes: Other fields of `ServiceRecord`; variables are added to those that it has.

        Raises:
            ConfigError: It names another environment, or an option cannot be.
            EnvironmentNotFound: There is no such version.
            FabricUnavailable: As for `create`; what was healthy before goes on.
        """
        source = await self._resolve(reference or record.reference)
        old, new = _environment(record), source.config.name
        if reference is not None and old not in (None, new):
            raise ConfigError(
                f"service {record.id} is of environment {old!r}, not of {new!r}",
                hint="create a service for another environment",
            )
        variables = changes.pop("environment_variables", None) or {}
        found: dict[str, Any] = record.model_dump() | {
            "updated_at": self._clock.now(),
            "environment_variables": {**record.environment_variables, **variables},
            **changes,
        }
        if reference is not None:
            found |= {"reference": _reference(reference, source), "digest": source.digest}
        changed = _checked(source, **found)
        await self._bring_up(changed, wait=wait)
        return changed

    async def delete(self, record: ServiceRecord, *, wait: bool = False) -> None:
        """End a service: calls under way end first, then its sandboxes."""
        await asyncio.to_thread(self._apps.delete, record.id, wait=wait)
        await self.records.delete(record)

    async def restore(self) -> None:
        """Deploy what the hub knows and Serve does not: Ray was started anew.

        What cannot be deployed is logged; its state says so too.
        """
        records = list((await self.records.all()).values())
        for record, state in zip(records, await self.states(records), strict=True):
            if state.status is not ServiceStatus.TERMINATED:
                continue
            try:
                await self._bring_up(record, wait=False)
            except AenvError as exc:
                logger.warning("service %s is not restored: %s", record.id, exc.message)

    async def states(self, records: list[ServiceRecord]) -> list[ServiceState]:
        """Return how services are."""
        return await asyncio.to_thread(self._apps.states, records)

    async def _bring_up(self, record: ServiceRecord, *, wait: bool) -> None:
        await self.records.put(record)
        try:
            await asyncio.to_thread(self._apps.deploy, record, wait=wait)
        except RuntimeError as exc:
            reason = (await self.states([record]))[0].reason or str(exc)
            raise FabricUnavailable(
                f"service {record.id} did not become healthy: {_last_line(reason)}",
                hint="aenv service get tells its state; what was healthy before goes on",
            ) from exc


def masked(record: ServiceRecord) -> dict[str, str]:
    """Return the variables of a service by name; values are secrets."""
    return dict.fromkeys(record.environment_variables, _MASK)


def _checked(source: Project, **fields: Any) -> ServiceRecord:
    """Return a record.

    Raises:
        ConfigError: A field has a value that cannot be.
    """
    try:
        record = ServiceRecord.model_validate(fields)
    except ValidationError as exc:
        problems = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
            for e in exc.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("; ".join(problems)) from None
    texts.checked_variables(record.environment_variables, what="environment_variables")
    chosen_engine(source, record.engine)
    if source.config.deploy.service.enable_storage:
        # Going on would lose what the environment means to keep.
        raise ConfigError(
            f"{source.reference} wants storage (deployConfig.service.enableStorage), and services "
            "have none",
            hint="set it to false where what tools write may end with their sandbox",
        )
    return record


def _made_up(environment: str) -> str:
    """Return a service name that nobody has."""
    stem = re.sub(r"[^a-z0-9-]+", "-", environment.lower()).strip("-")[:40]
    return check_name(f"{stem or 'env'}-svc-{secrets.token_hex(_SUFFIX_BYTES)}")


def _reference(reference: str, source: Project) -> str:
    if project.looks_like_path(reference):
        return str(Path(reference).resolve())
    return source.reference


def _environment(record: ServiceRecord) -> str | None:
    """Return the environment's name; None where a path was deployed."""
    if project.looks_like_path(record.reference):
        return None
    return ids.split_reference(record.reference)[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "Serve does not say why"


# --- Python ----------------------------------------------------------------------------------


def deploy(
    environment: str | Path,
    *,
    name: str | None = None,
    replicas: int = 1,
    autoscale: tuple[int, int] | None = None,
    environment_variables: Mapping[str, str] | None = None,
    engine: str | None = None,
    healthy_within_s: float = 120.0,
    owner: str = "",
    wait: bool = True,
) -> Any:
    """Make a service of an environment, or bring the one of that name up to what is said here.

    Joins or starts Ray first where needed.

    Args:
        environment: ``name@version`` or ``name``, or a project's path where all of Ray runs on
            one machine.
        name: Of the service; None: a new one with a name made up.
        replicas: How many sandboxes; 0 parks it.
        autoscale: Least and most replicas; Serve chooses by load. None: `replicas`.
        environment_variables: Added to the project's, and to those the service has.
        engine: None: as for an instance.
        healthy_within_s: How long its health function may take to say that it is healthy.
        owner: Whose it is; empty: nobody's but administrators'.
        wait: Return once all replicas are healthy.

    Returns:
        Ray Serve's handle of it: ``handle.call_tool.remote("echo", {"text": "hi"}).result()``;
        None of one that is parked.

    Raises:
        EnvironmentNotFound: There is no such environment.
        ConfigError: An option cannot be.
        FabricUnavailable: It does not become healthy; `aenv service get` says why.
    """
    entrance.init()
    changes: dict[str, Any] = {
        "replicas": replicas,
        "autoscale": None
        if autoscale is None
        else Autoscale.parse(f"{autoscale[0]}:{autoscale[1]}"),
        "environment_variables": dict(environment_variables or {}),
        "engine": engine,
        "healthy_within_s": healthy_within_s,
    }
    services = _services()
    reference = str(environment)

    async def bring() -> ServiceRecord:
        known = (await services.records.all()).get(name) if name is not None else None
        if known is None:
            return await services.create(reference, owner, name=name, wait=wait, **changes)
        return await services.update(known, wait=wait, reference=reference, **changes)

    record = blocking(bring())
    if record.replicas == 0:
        return None
    from ray import serve

    return serve.get_app_handle(app_name(record.id))


def remove(name: str) -> None:
    """End a service, its sandboxes too; waits for calls under way.

    Raises:
        ServiceNotFound: There is none of this name.
    """
    entrance.init()
    services = _services()

    async def end() -> None:
        await services.delete(await services.records.get(name), wait=True)

    blocking(end())


def state(name: str) -> ServiceState:
    """Return how a service is.

    Raises:
        ServiceNotFound: There is none of this name.
    """
    entrance.init()
    services = _services()

    async def look() -> ServiceState:
        return (await services.states([await services.records.get(name)]))[0]

    return blocking(look())


def _services() -> Services:
    async def resolve(reference: str) -> Project:
        return await asyncio.to_thread(references.resolve, reference, entrance.init)

    return Services(ensure_hub(), resolve, SystemClock(), ServeApps())
