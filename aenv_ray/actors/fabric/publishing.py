"""From a project to a published version: look at what it offers, keep its archive, tell the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray.actors.host.fresh_sandbox import MakeEngine, fresh_sandbox
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.images.serving import has_code
from aenv_ray.errors import ConfigError, DeadlineExceeded, SandboxStartFailed
from aenv_ray.hub import packing
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.hub.packing import Package
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion, FunctionSchema
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig, NetworkMode

INSPECT_S: Final = 600.0
"""Most of it is for a virtual environment that is built for the first time."""
_CALL_S: Final = 60.0
_LOOKING: Final = (NetworkMode.NONE, NetworkMode.HOST)
"""What a sandbox to look in may reach."""

Kind = Literal["tool", "function", "reward", "health"]


@dataclass(frozen=True)
class Inspection:
    """What an environment offers, as loading its code showed it."""

    functions: tuple[FunctionSchema, ...]
    note: str = ""
    """Why nothing is known of it, for people; empty when it was loaded."""


async def inspect(
    source: project.Project, *, timeout_s: float = INSPECT_S, make_engine: MakeEngine | None = None
) -> Inspection:
    """Load an environment in a sandbox of its own and return the schemas of what it registers.

    Nothing of it is called. What only runs in an image of its own is not loaded, and the note says
    so: it has no code here, or its code needs what is in the image.

    Args:
        source: The project.
        timeout_s: For all of it, its virtual environment too.
        make_engine: None: the process engine.

    Raises:
        SandboxStartFailed: Its code does not load; the message ends with the traceback.
        ConfigError: The project asks for what this machine does not have.
        DeadlineExceeded: `timeout_s` passed.
        FabricUnavailable: This machine makes no sandboxes.

    Cancelling ends what was started. Nothing is left in any case.
    """
    if not await asyncio.to_thread(has_code, source.path):
        return Inspection((), "it has no code here: its image is not looked into")
    try:
        async with asyncio.timeout(timeout_s):
            async with fresh_sandbox(
                source,
                lifetime_s=timeout_s,
                config=_for_looking(source.config),
                make_engine=make_engine,
            ) as sandbox:
                return Inspection(await _schemas(sandbox))
    except SandboxStartFailed as exc:
        if _runs_in_an_image(source.config):
            last_line = exc.message.strip().rpartition("\n")[2]
            return Inspection((), f"it does not load outside of its image: {last_line}")
        raise SandboxStartFailed(
            f"{source.reference} cannot be looked at: {exc.message}",
            hint="mend the project; `aenv run` shows the same error",
        ) from None
    except TimeoutError as exc:
        if isinstance(exc, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for the code of {source.reference} to load",
            hint="does it do long work, or wait for something, when it is imported?",
        ) from None


def _runs_in_an_image(config: EnvironmentConfig) -> bool:
    """Whether its instances cannot be processes of a node, or are not meant to be."""
    deploy = config.deploy
    return (
        deploy.engine not in (None, "process")
        or deploy.is_dual
        or deploy.network not in (None, *_LOOKING)
    )


def _for_looking(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return a config with what the process engine has: to load the code, less will do."""
    changes: dict[str, Any] = {}
    if config.deploy.network not in (None, *_LOOKING):
        changes |= {"network": NetworkMode.NONE, "allow": None}
    if config.deploy.is_dual:
        changes["pod_template"] = None
    deploy = config.deploy.model_copy(update=changes)
    return config.model_copy(update={"deploy": deploy})


async def _schemas(sandbox: Sandbox) -> tuple[FunctionSchema, ...]:
    tools = await sandbox.request("tools/list", {}, deadline_s=_CALL_S)
    listing = await sandbox.request("aenv/functions", {}, deadline_s=_CALL_S)
    return (
        *(_schema("tool", tool) for tool in tools["tools"]),
        *(_schema("function", entry) for entry in listing["functions"]),
        *(_schema("reward", entry) for entry in listing["reward"]),
        *(_schema("health", entry) for entry in listing["health"]),
    )


def _schema(kind: Kind, entry: Mapping[str, Any]) -> FunctionSchema:
    return FunctionSchema(
        kind=kind,
        name=entry["name"],
        description=entry.get("description") or "",
        input_schema=entry["inputSchema"],
        endpoint=entry.get("endpoint"),
        method=entry.get("method"),
    )


def entry_of(
    package: Package, functions: Sequence[FunctionSchema], owner: str | None
) -> EnvironmentVersion:
    """Return what the hub keeps of a project.

    Raises:
        ConfigError: Its config has a status that there is none of.
    """
    config = package.source.config
    return EnvironmentVersion(
        name=config.name,
        version=config.version,
        digest=package.source.digest,
        archive=package.sha256,
        archive_bytes=len(package.data),
        config=config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        artifacts=config.artifacts,
        functions=tuple(functions),
        description=config.description,
        tags=config.tags,
        status=_status(config.status),
        owner=owner,
    )


def _status(text: str) -> EnvironmentStatus:
    try:
        return EnvironmentStatus(text or EnvironmentStatus.READY)
    except ValueError:
        known = ", ".join(EnvironmentStatus)
        raise ConfigError(
            f"config.json: there is no status {text!r}", hint=f"one of {known}"
        ) from None


async def publish(
    data: bytes,
    owner: str | None,
    *,
    hub: Hub,
    store: ArtifactStore,
    projects_dir: Path,
    allow: Sequence[str] = (),
    timeout_s: float = INSPECT_S,
) -> EnvironmentVersion:
    """Publish a project's archive, whoever made it, and return the version as it is kept.

    What is kept is the archive that `aenv_ray.project.project.Project.archive` makes of it. The
    order is such that a version never names an archive that is not there; doing it again is the
    same.

    Args:
        data: A tar, a gzipped tar or a zip.
        owner: Who pushes it.
        hub: Where the version is kept.
        store: Where the archive is kept.
        projects_dir: Of unpacked projects, by digest.
        allow: Files that may look like secrets, as for `aenv_ray.hub.packing.pack`.
        timeout_s: For `inspect`.

    Raises:
        AenvError: As `aenv_ray.hub.packing.unpack_any` and `pack`, `inspect`, `ArtifactStore.put`
            and `Hub.push` do; nothing is published then.
    """
    source = await asyncio.to_thread(packing.unpack_any, data, projects_dir)
    package = await asyncio.to_thread(packing.pack, source, allow=allow)
    found = await inspect(source, timeout_s=timeout_s)
    await store.put(package.data, digest=package.sha256)
    entry = await hub.push(entry_of(package, found.functions, owner))
    if not await store.exists(package.sha256):  # the same bytes were refused to somebody just now
        await store.put(package.data, digest=package.sha256)
    return entry
