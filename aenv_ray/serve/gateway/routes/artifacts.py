"""Control routes that carry source archives and publish them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

import pydantic_core
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from aenv_ray import ids
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    ArtifactNotFound,
    ArtifactStoreDenied,
    ArtifactStoreFull,
    ConfigError,
    EnvironmentNotFound,
    SandboxStartFailed,
    VersionConflict,
)
from aenv_ray.hub.records import EnvironmentQuery, EnvironmentVersion
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.serve.gateway.http import ClientLeft
from aenv_ray.serve.gateway.limits import pieces_of
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Access, Asked, Endpoint, Nothing, parse_body
from aenv_ray.serve.gateway.routes.shapes import (
    ArtifactObject,
    EnvironmentObject,
    PublishRequest,
    SignStyle,
)
from aenv_ray.serve.gateway.signing import Signature, Signer

logger = logging.getLogger(__name__)

TAG: Final = "publishing"
UPLOADS: Final = "upload"
"""Kind of the hub's documents of archives that came by a signed URL and are not published yet."""
_STORE: Final = (ArtifactStoreDenied, ArtifactStoreFull)


class Publish(Protocol):
    """Publishes a source archive that anybody may have made."""

    async def __call__(
        self, archive: bytes, owner: str, *, allow: Sequence[str] = ()
    ) -> EnvironmentVersion:
        """Return the version as it is kept.

        Args:
            archive: The archive.
            owner: Who publishes it.
            allow: Files that may look like secrets.

        Raises:
            ConfigError: It is no project, or holds what it must not, or what looks like a secret.
            SandboxStartFailed: Its code does not load.
            VersionConflict: The version exists with other content.
        """
        ...


class ReferenceConfig(BaseModel):
    """A ``config.json``, as AEnvironment's CLI sends it; unknown fields are kept."""

    model_config = EnvironmentConfig.model_config | {"extra": "allow"}

    name: str
    version: str = "1.0.0"


def endpoints(control: Control, signer: Signer, publish: Publish) -> list[Endpoint]:
    """Return the routes."""
    routes = ArtifactRoutes(control, signer, publish)
    publishing = (VersionConflict, SandboxStartFailed, ArtifactNotFound, ArtifactDamaged, *_STORE)
    artifact, archive = "/artifacts/{digest}", "/archives/{name}/{version}"
    one = "/env/{name}/{version}"
    return [
        Endpoint("PUT", artifact, routes.put, "Upload an artifact under its SHA-256", TAG,
                 data=ArtifactObject, upload=True, errors=(ArtifactDamaged, *_STORE)),
        Endpoint("HEAD", artifact, routes.head, "Whether an artifact is there", TAG,
                 media="application/octet-stream", errors=(ArtifactNotFound,)),
        Endpoint("GET", artifact, routes.get, "Download an artifact", TAG,
                 media="application/octet-stream", errors=(ArtifactNotFound, ArtifactDamaged)),
        Endpoint("POST", "/publish", routes.publish, "Publish an uploaded source archive", TAG,
                 body=PublishRequest, data=EnvironmentObject, errors=publishing),
        *(
            Endpoint("POST", path, routes.create, "Publish by config.json (AEnvironment)", TAG,
                     body=ReferenceConfig, data=bool, errors=publishing)
            for path in ("/env/", "/env")
        ),
        Endpoint("PUT", one, routes.update, "Publish by config.json again (AEnvironment)", TAG,
                 body=ReferenceConfig, data=bool, errors=publishing),
        Endpoint("POST", f"{one}/sign", routes.sign, "A URL to upload or download a source "
                 "archive without a token (AEnvironment)", TAG, query=SignStyle, data=str),
        Endpoint("PUT", archive, routes.put_signed, "Upload by a signed URL", TAG,
                 Access.CAPABILITY, query=Signature, data=ArtifactObject, upload=True,
                 errors=_STORE),
        Endpoint("GET", archive, routes.get_signed, "Download by a signed URL", TAG,
                 Access.CAPABILITY, query=Signature, media="application/octet-stream",
                 errors=(EnvironmentNotFound, ArtifactNotFound, ArtifactDamaged)),
    ]  # fmt: skip


class ArtifactRoutes:
    """The handlers."""

    def __init__(self, control: Control, signer: Signer, publish: Publish) -> None:
        self._hub = control.deps.hub
        self._store = control.deps.artifacts
        self._limit = control.deps.settings.max_artifact_bytes
        self._signer = signer
        self._publish = publish

    # --- artifacts ----------------------------------------------------------------------------

    async def put(self, asked: Asked[Nothing, None]) -> ArtifactObject:
        """Keep a body under the name that it must have."""
        digest = await self._store.put(
            _body(asked.request), digest=asked.path["digest"], limit_bytes=self._limit
        )
        return ArtifactObject(digest=digest, size_bytes=await self._store.size(digest))

    async def get(self, asked: Asked[Nothing, None]) -> Response:
        """Send one."""
        return await self._sent(asked.path["digest"])

    async def head(self, asked: Asked[Nothing, None]) -> Response:
        """Tell its size."""
        size = await self._store.size(asked.path["digest"])
        return Response(
            headers={"Content-Length": str(size)}, media_type="application/octet-stream"
        )

    async def _sent(self, digest: str) -> Response:
        size = await self._store.size(digest)  # what is not there is told with its status
        return StreamingResponse(
            self._store.open(digest),
            headers={"Content-Length": str(size)},
            media_type="application/octet-stream",
        )

    # --- publishing ---------------------------------------------------------------------------

    async def publish(self, asked: Asked[Nothing, PublishRequest]) -> EnvironmentObject:
        """Publish an artifact."""
        body = asked.body
        entry = await self._published(body.archive, asked.principal.owner, body.allow_secrets)
        return EnvironmentObject.of(entry, is_whole=True)

    async def _published(
        self, digest: str, owner: str, allow: Sequence[str] = ()
    ) -> EnvironmentVersion:
        archive = await self._store.read(digest, limit_bytes=self._limit)
        try:
            return await self._publish(archive, owner, allow=allow)
        except ConfigError:
            # What is refused for what is in it, such as a secret, is not kept either.
            try:
                await self._drop(digest, archive)
            except AenvError as exc:
                logger.warning("the refused archive %s stays: %s", digest[:12], exc.message)
            raise

    async def _drop(self, digest: str, archive: bytes) -> None:
        """Remove an archive from the store, unless it is some version's.

        Somebody else may publish the same bytes, with leave for what looks like a secret, just now:
        `aenv_ray.actors.fabric.publishing.publish` and this each look again after they have acted.
        """
        if await self._is_published(digest):
            return
        await self._store.delete(digest)
        if await self._is_published(digest):
            await self._store.put(archive, digest=digest)

    async def _is_published(self, digest: str) -> bool:
        cursor: str | None = None
        while True:
            page = await self._hub.environments(EnvironmentQuery(limit=1000, cursor=cursor))
            if any(digest == entry.archive for entry in page.items):
                return True
            cursor = page.cursor
            if cursor is None:
                return False

    async def create(self, asked: Asked[Nothing, ReferenceConfig]) -> bool:
        """Publish what was uploaded for the version, or else its config alone."""
        body = asked.body
        reference = f"{body.name}@{body.version}"
        ids.split_reference(reference)
        name = _upload_name(reference, asked.principal.owner)
        upload = (await self._hub.documents(UPLOADS)).get(name)
        if upload is not None:
            entry = await self._published(upload["archive"], asked.principal.owner)
            await self._hub.delete_document(UPLOADS, name)
            if entry.reference != reference:
                raise ConfigError(f"the archive was of {entry.reference}, and is published as that")
        else:
            await self._hub.push(_entry_of_config(body, asked.principal.owner))
        return True

    async def update(self, asked: Asked[Nothing, ReferenceConfig]) -> bool:
        """Publish again: a version never changes, so the same content does nothing."""
        name, version = asked.path["name"], asked.path["version"]
        if (asked.body.name, asked.body.version) != (name, version):
            raise ConfigError(f"the config is not that of {name}@{version}")
        return await self.create(asked)

    # --- signed URLs --------------------------------------------------------------------------

    async def sign(self, asked: Asked[SignStyle, None]) -> str:
        """Return a URL on the gateway itself."""
        name, version = asked.path["name"], asked.path["version"]
        ids.split_reference(f"{name}@{version}")
        method = "GET" if asked.query.style == "read" else "PUT"
        path = f"/archives/{name}/{version}"
        signed = await self._signer.sign(method, path, asked.principal.owner)
        return str(asked.request.base_url).rstrip("/") + signed

    async def put_signed(self, asked: Asked[Signature, None]) -> ArtifactObject:
        """Keep an archive until it is published."""
        await self._signer.check("PUT", asked.request.url.path, asked.query)
        digest = await self._store.put(_body(asked.request), limit_bytes=self._limit)
        reference = f"{asked.path['name']}@{asked.path['version']}"
        name = _upload_name(reference, asked.query.owner)
        await self._hub.put_document(UPLOADS, name, {"archive": digest})
        return ArtifactObject(digest=digest, size_bytes=await self._store.size(digest))

    async def get_signed(self, asked: Asked[Signature, None]) -> Response:
        """Send a version's archive."""
        await self._signer.check("GET", asked.request.url.path, asked.query)
        entry = await self._hub.environment(asked.path["name"], asked.path["version"])
        if not entry.archive:
            raise EnvironmentNotFound(f"{entry.reference} was published without its source")
        return await self._sent(entry.archive)


def _upload_name(reference: str, owner: str) -> str:
    """Return what an upload waits under: another owner's of the same version is another one."""
    return f"{reference} {owner}"


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces_of(request):
            yield piece
    except ClientDisconnect:
        raise ClientLeft from None


def _entry_of_config(body: ReferenceConfig, owner: str) -> EnvironmentVersion:
    """Return a version without source: it can be listed, and makes no instances.

    Raises:
        ConfigError: The config is malformed.
    """
    config: dict[str, Any] = body.model_dump(mode="json")
    parsed = parse_body(EnvironmentConfig, pydantic_core.to_json(config))
    assert isinstance(parsed, EnvironmentConfig)
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
