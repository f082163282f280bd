"""Publishes a project: inspect what it registers, store its archive, create the version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray.actors.host.fresh_sandbox import EngineForHost, fresh_sandbox
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.images.serving import has_code
from aenv_ray.errors import ConfigError, DeadlineExceeded, SandboxStartFailed
from aenv_ray.hub import catalog, packing
from aenv_ray.hub.api import Hub
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.hub.packing import Package
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion, FunctionSchema
from aenv_ray.policy import Policy
from aenv_ray.project import project
from aenv_ray.project.config import EnvironmentConfig, NetworkMode

INSPECT_S: Final = 600.0
"""Deadline of an inspection; a new virtual environment takes most of it."""
_CALL_S: Final = 60.0
_INSPECTABLE: Final = (NetworkMode.NONE, NetworkMode.HOST)
"""Networks with which a project can be inspected."""

Kind = Literal["tool", "function", "reward", "health"]


@dataclass(frozen=True)
class Inspection:
    """What the code of an environment registers."""

    functions: tuple[FunctionSchema, ...]
    note: str = ""
    """Why its code was not loaded; empty if it was."""


async def inspect(
    source: project.Project,
    *,
    timeout_s: float = INSPECT_S,
    make_engine: EngineForHost | None = None,
    policy: Policy | None = None,
) -> Inspection:
    """Load an environment in a temporary sandbox and return the schemas of what it registers.

    No function of it is called. A project that only runs in its own image, because it has no code
    or its code needs the image, is not loaded, and the note says so.

    Args:
        source: The project.
        timeout_s: Longest time, including the installation of requirements.
        make_engine: None: the process engine.
        policy: Supplies what the project does not name, such as its network, and says whether a
            sandbox is required. None: supplies nothing, and this process's settings say whether.

    Raises:
        SandboxStartFailed: Its code does not load; the message ends with the traceback.
        ConfigError: The project needs something that this machine does not have.
        DeadlineExceeded: `timeout_s` passed.
        FabricUnavailable: This machine cannot make sandboxes.

    The sandbox is gone afterwards, also after an error or cancellation.
    """
    if not await asyncio.to_thread(has_code, source.path):
        return Inspection(
            (), "the project has no code outside of its image, which is not inspected"
        )
    try:
        async with asyncio.timeout(timeout_s):
            async with fresh_sandbox(
                source,
                lifetime_s=timeout_s,
                config=_for_inspection((policy or Policy()).filled(source.config, "process")),
                make_engine=make_engine,
                isolation=None if policy is None else _for_pushed(policy),
            ) as sandbox:
                return Inspection(await _schemas(sandbox))
    except (SandboxStartFailed, ConfigError) as exc:
        if _runs_in_an_image(source.config):
            last_line = exc.message.strip().rpartition("\n")[2]
            return Inspection((), f"its code does not load outside of its image: {last_line}")
        if isinstance(exc, ConfigError):
            raise
        raise SandboxStartFailed(
            f"{source.reference} cannot be inspected: {exc.message}",
            hint=exc.hint or "fix the project; `aenv run` shows the same error",
        ) from None
    except TimeoutError as exc:
        if isinstance(exc, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            f"the code of {source.reference} did not load within {timeout_s:g} s",
            hint="check for slow work, or waits, at import",
        ) from None


def _runs_in_an_image(config: EnvironmentConfig) -> bool:
    """Whether its instances cannot be plain processes, or are not meant to be."""
    deploy = config.deploy
    return (
        deploy.engine not in (None, "process")
        or deploy.is_dual
        or deploy.network not in (None, *_INSPECTABLE)
    )


def _for_inspection(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return a config that the process engine can run, which is enough to load the code."""
    changes: dict[str, Any] = {}
    if config.deploy.network not in (None, *_INSPECTABLE):
        changes |= {"network": NetworkMode.NONE, "allow": None}
    if config.deploy.is_dual:
        changes["pod_template"] = None
    deploy = config.deploy.model_copy(update=changes)
    return config.model_copy(update={"deploy": deploy})


async def _schemas(sandbox: Sandbox) -> tuple[FunctionSchema, ...]:
    tools = await sandbox.request("tools/list", {}, deadline_s=_CALL_S)
    listing = await sandbox.request("aenv/functions", {}, deadline_s=_CALL_S)
    try:
        return (
            *(_schema("tool", tool) for tool in tools["tools"]),
            *(_schema("function", entry) for entry in listing["functions"]),
            *(_schema("reward", entry) for entry in listing["reward"]),
            *(_schema("health", entry) for entry in listing["health"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise SandboxStartFailed(
            "its runtime returned a malformed list of functions",
            hint="project code must not replace parts of aenv; read the log of the sandbox",
        ) from exc


def _schema(kind: Kind, entry: Mapping[str, Any]) -> FunctionSchema:
    return FunctionSchema(
        kind=kind,
        name=entry["name"],
        description=entry.get("description") or "",
        input_schema=entry["inputSchema"],
        endpoint=entry.get("endpoint"),
        method=entry.get("method"),
    )


def _for_pushed(policy: Policy) -> str:
    """Return the isolation of an inspection: required, unless the operator turned it off."""
    return "none" if policy.isolation == "none" else "required"


def entry_of(
    package: Package, functions: Sequence[FunctionSchema], owner: str | None
) -> EnvironmentVersion:
    """Return the version of a project for the hub.

    Raises:
        ConfigError: Its config has an unknown status.
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
            f"config.json: unknown status {text!r}", hint=f"use one of {known}"
        ) from None


async def publish(
    data: bytes | Path,
    owner: str | None,
    *,
    hub: Hub,
    store: ArtifactStore,
    projects_dir: Path,
    policy: Policy,
    artifact_quota_bytes: int | None = None,
    is_admin: bool = False,
    allow: Sequence[str] = (),
    timeout_s: float = INSPECT_S,
) -> EnvironmentVersion:
    """Publish the archive of a project and return the stored version; idempotent.

    The archive is repacked by `aenv_ray.project.project.Project.archive`, and stored before the
    version that names it.

    Args:
        data: A tar, a gzipped tar or a zip, made by anybody, or the path of one.
        owner: Who publishes it.
        hub: Stores the version.
        store: Stores the archive.
        projects_dir: Directory of unpacked projects, by digest.
        policy: What the project may request.
        artifact_quota_bytes: How much the owner's artifacts may take in all; None: no limit.
        is_admin: Publish it even if another owner has the name.
        allow: Files that may look like secrets, as for `aenv_ray.hub.packing.pack`.
        timeout_s: For `inspect`.

    Raises:
        ArtifactQuotaExceeded: The owner has no room for the repacked archive, which is not stored.
        AenvError: As `aenv_ray.hub.packing.unpack_any` and `pack`, `inspect`, `ArtifactStore.put`
            and `Hub.push`; nothing is published.
    """
    source = await asyncio.to_thread(packing.unpack_any, data, projects_dir)
    policy.check(source.config)
    catalog.check_may_publish(await hub.name(source.config.name), owner, is_admin=is_admin)
    package = await asyncio.to_thread(packing.pack, source, allow=allow)
    found = await inspect(source, timeout_s=timeout_s, policy=policy)
    # Before it is stored: an archive that is stored but not published can then be collected.
    if owner is not None:
        await hub.keep_artifact(owner, package.sha256, len(package.data), artifact_quota_bytes)
    await store.put(package.data, digest=package.sha256)
    entry = await hub.push(entry_of(package, found.functions, owner), is_admin=is_admin)
    # A refused push of the same bytes may have deleted the archive just now.
    if not await store.exists(package.sha256):
        await store.put(package.data, digest=package.sha256)
    return entry
