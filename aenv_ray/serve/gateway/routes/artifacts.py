"""Control routes that transfer source archives and publish them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import pydantic_core
from fastapi import Query
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from aenv_ray import ids
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    ArtifactNotFound,
    ArtifactQuotaExceeded,
    ArtifactStoreDenied,
    ArtifactStoreFull,
    CatalogConflict,
    ConfigError,
    EnvironmentNotFound,
    Forbidden,
    RateLimited,
    SandboxStartFailed,
    VersionConflict,
)
from aenv_ray.hub import catalog
from aenv_ray.hub.artifacts import ArtifactStore
from aenv_ray.hub.records import EnvironmentVersion, KeyGroup, Role
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.serve.gateway.artifact_collection import UPLOAD_KEPT_S, UPLOADS
from aenv_ray.serve.gateway.auth import principal_in
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.deps import Deps
from aenv_ray.serve.gateway.requests import STREAMED, ClientLeft, pieces_of
from aenv_ray.serve.gateway.routes.control import RouteCall
from aenv_ray.serve.gateway.routes.routing import (
    PublicCall,
    PublisherCall,
    UserCall,
    control_router,
    validated,
)
from aenv_ray.serve.gateway.routes.schemas import (
    ArtifactObject,
    EnvironmentObject,
    PublishRequest,
    SignStyle,
)
from aenv_ray.serve.gateway.signing import UrlSignature

logger = logging.getLogger(__name__)

router = control_router("publishing")
UPLOAD_S: Final = 600.0
"""Longest upload, which another one may wait for."""
MAX_UPLOADS: Final = 100
"""Number of archives that an owner has uploaded by signed URLs, and not published."""
_AT_ONCE_S: Final = 0.001

_STORE: Final = (ArtifactStoreDenied, ArtifactStoreFull, ArtifactQuotaExceeded)
_PUBLISH: Final = failures(
    CatalogConflict, VersionConflict, SandboxStartFailed, ArtifactNotFound, ArtifactDamaged, *_STORE
)
_BINARY: Final = {"type": "string", "format": "binary"}
_UPLOAD: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": _BINARY}},
    }
}


class ArchiveResponse(StreamingResponse):
    """The bytes of an artifact."""

    media_type = "application/octet-stream"


class ReferenceConfig(BaseModel):
    """A ``config.json`` as AEnvironment's CLI sends it; unknown fields are preserved."""

    model_config = EnvironmentConfig.model_config | {"extra": "allow"}

    name: str
    version: str = "1.0.0"


# --- artifacts -----------------------------------------------------------------------------------


@router.put(
    "/artifacts/{digest}",
    openapi_extra=_UPLOAD,
    responses=failures(ArtifactDamaged, CatalogConflict, *_STORE),
)
async def put_artifact(call: PublisherCall, digest: str) -> ArtifactObject:
    """Upload an artifact under its SHA-256."""
    return await _stored(call, call.caller.owner, digest)


@router.head(
    "/artifacts/{digest}",
    response_class=ArchiveResponse,
    responses=failures(ArtifactNotFound),
)
async def head_artifact(call: UserCall, digest: str) -> Response:
    """Tell whether an artifact exists, and its size."""
    await call.check_archive(digest)
    size = await call.control.deps.artifacts.size(digest)
    return Response(headers={"Content-Length": str(size)}, media_type="application/octet-stream")


@router.get(
    "/artifacts/{digest}",
    response_class=ArchiveResponse,
    responses=failures(ArtifactNotFound, ArtifactDamaged),
)
async def get_artifact(call: UserCall, digest: str) -> Response:
    """Download an artifact."""
    await call.check_archive(digest)
    return await _sent(call.control.deps, digest)


async def _stored(call: RouteCall, owner: str, digest: str | None = None) -> ArtifactObject:
    """Store the body of a request as an owner's artifact.

    Raises:
        ArtifactQuotaExceeded: The owner has no room for it; nothing is stored.
        CatalogConflict: The collector deletes the same artifact just now.
        HTTPException: 408: it did not arrive within `UPLOAD_S`; nothing is stored.
    """
    deps, hub, quota = call.control.deps, call.hub, call.control.deps.artifact_quota_bytes
    held = await hub.artifacts_held(owner)
    is_new = digest is None or not await hub.has_artifact(owner, digest)
    if is_new and catalog.is_full(held, 1, quota):
        raise catalog.artifacts_full(owner, held, 1, quota)

    async def keep(found: str, size: int) -> None:
        # First, so that an upload that is cut off here is collected like others.
        await hub.keep_artifact(owner, found, size, quota)

    async with call.control.uploads.turn(owner):
        try:
            async with asyncio.timeout(UPLOAD_S):
                digest = await deps.artifacts.put(
                    _body(call.request),
                    digest=digest,
                    limit_bytes=deps.settings.max_artifact_bytes,
                    before_commit=keep,
                )
        except TimeoutError:
            message = f"the artifact did not arrive within {UPLOAD_S:g} s"
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
    size = await deps.artifacts.size(digest)
    return ArtifactObject(digest=digest, size_bytes=size)


async def _body(request: Request) -> AsyncIterator[bytes]:
    request.scope[STREAMED] = True
    try:
        async for piece in pieces_of(request):
            yield piece
    except ClientDisconnect:
        raise ClientLeft from None


async def _sent(deps: Deps, digest: str) -> Response:
    size = await deps.artifacts.size(digest)  # before the answer begins: 404 if it is missing
    return ArchiveResponse(deps.artifacts.open(digest), headers={"Content-Length": str(size)})


# --- publishing ----------------------------------------------------------------------------------


@router.post("/publish", responses=_PUBLISH)
async def publish(call: PublisherCall, body: PublishRequest) -> EnvironmentObject:
    """Publish an uploaded source archive."""
    entry = await _publish(call, body.archive, call.caller.owner, body.allow_secrets)
    return EnvironmentObject.of(entry, is_whole=True)


@router.post("/env", responses=_PUBLISH)
@router.post("/env/", responses=_PUBLISH)
async def create_version(call: PublisherCall, body: ReferenceConfig) -> bool:
    """Publish by config.json (AEnvironment).

    Publishes the archive that was uploaded for the version, or else the config alone.
    """
    await _publish_config(call, body)
    return True


@router.put("/env/{name}/{version}", responses=_PUBLISH)
async def update_version(
    call: PublisherCall, name: str, version: str, body: ReferenceConfig
) -> bool:
    """Publish by config.json again (AEnvironment).

    A version never changes, so publishing the same content again does nothing.
    """
    if (body.name, body.version) != (name, version):
        raise ConfigError(
            f"the config is of {body.name}@{body.version}, but the URL names {name}@{version}",
            hint="make the URL and the config name the same version",
        )
    await _publish_config(call, body)
    return True


async def _publish_config(call: RouteCall, config: ReferenceConfig) -> None:
    hub, owner = call.hub, call.caller.owner
    reference = f"{config.name}@{config.version}"
    call.note(subject=reference)
    ids.split_reference(reference)
    name = _upload_name(reference, owner)
    upload = (await hub.documents(UPLOADS)).get(name)
    if upload is None:
        entry = _entry_of_config(config, owner)
        call.control.deps.policy().check(validated(EnvironmentConfig, entry.config))
        await hub.push(entry, is_admin=call.caller.is_admin)
        call.control.environments.forget(config.name)
        return
    entry = await _publish(call, upload["archive"], owner)
    await hub.shorten([_place(name)], _AT_ONCE_S, _places(owner))
    await hub.delete_document(UPLOADS, name)
    if entry.reference != reference:
        raise ConfigError(
            f"the config is of {reference}, but the uploaded archive contains {entry.reference} "
            "and was published as that",
            hint="correct config.json in the archive, and publish again",
        )


def _upload_name(reference: str, owner: str) -> str:
    """Return the name of an upload's document; each owner has its own upload of a version."""
    return f"{reference} {owner}"


def _place(document: str) -> str:
    """Return the key that counts an upload among those of its owner."""
    return f"upload:{document}"


def _places(owner: str) -> KeyGroup:
    return KeyGroup(name=f"uploads:{owner}", most=MAX_UPLOADS)


def _too_many_uploads(owner: str) -> ArtifactQuotaExceeded:
    return ArtifactQuotaExceeded(
        f"{owner} has uploaded archives of {MAX_UPLOADS} versions that are not published",
        hint="publish them, or wait: they are forgotten after a day",
    )


def _entry_of_config(body: ReferenceConfig, owner: str) -> EnvironmentVersion:
    """Return a version without source: it can be listed, but no instance can be created.

    Raises:
        ConfigError: The config is malformed.
    """
    config: dict[str, Any] = body.model_dump(mode="json")
    parsed = validated(EnvironmentConfig, config)
    text = pydantic_core.to_json(dict(sorted(config.items())))
    return EnvironmentVersion(
        name=parsed.name,
        version=parsed.version,
        digest=hashlib.sha256(text).hexdigest(),
        archive="",
        archive_bytes=0,
        config=config,
        artifacts=parsed.artifacts,
        description=parsed.description,
        tags=parsed.tags,
        owner=owner,
    )


async def _publish(
    call: RouteCall, digest: str, owner: str, allow: Sequence[str] = ()
) -> EnvironmentVersion:
    deps, control = call.control.deps, call.control
    call.note(archive=digest)
    await call.check_archive(digest)
    size = await deps.artifacts.size(digest)
    await call.hub.keep_artifact(owner, digest, size, deps.artifact_quota_bytes)
    try:
        async with control.publishes.turn(owner):
            with tempfile.TemporaryDirectory(prefix="aenv-publish-") as directory:
                archive = Path(directory, "archive")
                await _download(deps.artifacts, digest, archive)
                entry = await control.publish(
                    archive, owner, is_admin=call.caller.is_admin,
                    artifact_quota_bytes=deps.artifact_quota_bytes, allow=allow,
                )  # fmt: skip
        call.note(subject=entry.reference, digest=entry.digest)
    except (ConfigError, Forbidden):
        # An archive that is refused, for a secret for example, is not stored either.
        try:
            await control.collector.drop(digest, owner)
        except AenvError as exc:
            logger.warning("refused archive %s was not deleted: %s", digest[:12], exc.message)
        raise
    control.environments.forget(entry.name)
    return entry


async def _download(store: ArtifactStore, digest: str, target: Path) -> None:
    """Write an artifact to a file, piece by piece."""
    with target.open("wb") as file:
        async for piece in store.open(digest):
            await asyncio.to_thread(file.write, piece)


# --- signed URLs ---------------------------------------------------------------------------------


@router.post("/env/{name}/{version}/sign")
async def sign(
    call: UserCall, name: str, version: str, query: Annotated[SignStyle, Query()]
) -> str:
    """Create a URL to upload or download a source archive without a token (AEnvironment)."""
    ids.split_reference(f"{name}@{version}")
    if query.style == "write":
        call.caller.check_role(Role.PUBLISHER)
    else:
        await _check_read(call, name)
    method = "GET" if query.style == "read" else "PUT"
    path = _signed_path(name, version)
    return call.control_url() + await call.control.signer.sign(method, path, call.caller.token_id)


async def _check_read(call: RouteCall, name: str) -> None:
    """Check that the caller may read what is published under a name.

    Everybody may use a built-in environment of this name; that does not count here.

    Raises:
        EnvironmentNotFound: The name belongs to another owner, who has not granted its use.
    """
    if not await call.may_use(name):
        raise catalog.unpublished(name)


async def _admit_signed(call: RouteCall, method: str, path: str, query: UrlSignature) -> None:
    """Admit a request by its signature, as the principal who signed it.

    Raises:
        Forbidden: The signature is not valid, or the signer's token no longer is.
        RateLimited: Too many requests of the signer's owner.
    """
    signer = principal_in(await call.control.signer.check(method, path, query))
    call.control.rate.take(f"signed {signer.owner}")
    call.request.scope["aenv.principal"] = signer


def _signed_path(name: str, version: str) -> str:
    """Return the path of an archive.

    Not that of `Request.url`: with Starlette before 1.0.1, the Host header can replace it
    (CVE-2026-48710).
    """
    return f"/archives/{name}/{version}"


@router.put(
    "/archives/{name}/{version}",
    openapi_extra=_UPLOAD,
    responses=failures(Forbidden, RateLimited, CatalogConflict, *_STORE),
)
async def put_signed(
    call: PublicCall, name: str, version: str, query: Annotated[UrlSignature, Query()]
) -> ArtifactObject:
    """Upload by a signed URL."""
    await _admit_signed(call, "PUT", _signed_path(name, version), query)
    owner = call.caller.owner
    document = _upload_name(f"{name}@{version}", owner)
    mine = {n for n in await call.hub.documents(UPLOADS) if n.partition(" ")[2] == owner}
    if document not in mine and len(mine) >= MAX_UPLOADS:
        raise _too_many_uploads(owner)  # before its body is read
    stored = await _stored(call, owner)
    # Others may have been stored meanwhile: any number of uploads may run at once.
    place = _place(document)
    if not await call.hub.replace_remembered(place, "1", "1", UPLOAD_KEPT_S, _places(owner)):
        raise _too_many_uploads(owner)
    at = call.control.deps.clock.now()
    await call.hub.put_document(UPLOADS, document, {"archive": stored.digest, "at": at})
    return stored


@router.get(
    "/archives/{name}/{version}",
    response_class=ArchiveResponse,
    responses=failures(
        Forbidden, RateLimited, EnvironmentNotFound, ArtifactNotFound, ArtifactDamaged
    ),
)
async def get_signed(
    call: PublicCall, name: str, version: str, query: Annotated[UrlSignature, Query()]
) -> Response:
    """Download by a signed URL."""
    await _admit_signed(call, "GET", _signed_path(name, version), query)
    await _check_read(call, name)
    entry = await call.hub.environment(name, version)
    if not entry.archive:
        raise EnvironmentNotFound(
            f"{entry.reference} was published without its source",
            hint="publish it with `aenv push`",
        )
    return await _sent(call.control.deps, entry.archive)
