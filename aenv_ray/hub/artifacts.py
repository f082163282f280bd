"""The artifact store: bytes by the SHA-256 of what they are.

What has a name is whole and is that content: a name is checked when bytes come in and again when
they go out. Any number of processes may use one store at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.config import Settings
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    ArtifactTooLarge,
    ConfigError,
    FabricUnavailable,
)
from aenv_ray.hub.artifact_files import ArtifactFiles, DirectoryFiles, UrlFiles, missing
from aenv_ray.project.archive import MAX_ARCHIVE_BYTES

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 1024 * 1024
"""Read and written at once: a thread's wake-up costs little beside it."""
DEADLINE_S: Final = 60.0
"""For each piece."""
_THREADS: Final = 8
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

OnProgress = Callable[[int, int | None], None]
"""Told how many bytes are through, and how many there are; None when that is not known."""

P = ParamSpec("P")
R = TypeVar("R")


class ArtifactStore:
    """Artifacts by digest.

    Args:
        files: Where they lie.

    Each method may raise FabricUnavailable (the store cannot be reached; try again),
    ArtifactStoreDenied or ArtifactStoreFull, and ConfigError for what is no digest. Safe for any
    number of tasks of one event loop; each may be cancelled at any time and leaves nothing then.
    """

    def __init__(self, files: ArtifactFiles) -> None:
        self._files = files
        # Its own: a store that hangs must not keep everybody else's threads.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aenv-artifacts")

    @property
    def name(self) -> str:
        """Where it is, for people; nothing secret."""
        return self._files.name

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, which other machines may have too, or not."""
        return isinstance(self._files, DirectoryFiles)

    async def put(
        self,
        data: bytes | AsyncIterable[bytes],
        *,
        digest: str | None = None,
        limit_bytes: int = MAX_ARCHIVE_BYTES,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Keep bytes and return their digest; what is there already is written anew.

        Args:
            data: All of them, or pieces of any size as they come.
            digest: What they must be. None: whatever they are.
            limit_bytes: How many there may be.
            on_progress: Told after each piece.

        Raises:
            ArtifactTooLarge: There are more; nothing is kept.
            ArtifactDamaged: They are not those of `digest`; nothing is kept.
        """
        if digest is not None:
            _check(digest)
        total = len(data) if isinstance(data, bytes) else None
        if total is not None:
            _check_limit(total, limit_bytes)
        found, done = hashlib.sha256(), 0
        upload = await self._run(self._files.begin)
        try:
            async for piece in _pieces(data):
                done += len(piece)
                _check_limit(done, limit_bytes)
                found.update(piece)
                await self._run(upload.write, piece)
                if on_progress is not None:
                    on_progress(done, total)
            if digest not in (None, found.hexdigest()):
                raise ArtifactDamaged(
                    f"what came as {str(digest)[:12]} is {found.hexdigest()[:12]}: it was damaged "
                    "on its way, or named wrongly",
                    hint="send it again",
                )
            await self._run(upload.commit, found.hexdigest())
        except BaseException:
            try:
                await self._run(upload.abort)
            except AenvError as exc:
                logger.warning("an unfinished upload stays behind: %s", exc)
            raise
        return found.hexdigest()

    async def open(
        self, digest: str, *, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield an artifact's bytes in pieces; the last one only once all of them are right.

        Raises:
            ArtifactNotFound: There is none, before the first piece.
            ArtifactDamaged: It is not what its name says, instead of the last piece.
        """
        total = await self.size(digest)
        found, done, held = hashlib.sha256(), 0, b""
        while piece := await self._run(self._files.read, digest, done, PIECE_BYTES):
            if held:
                yield held
            held = piece
            done += len(piece)
            found.update(piece)
            if on_progress is not None:
                on_progress(done, total)
        if found.hexdigest() != digest:
            raise ArtifactDamaged(
                f"{digest[:12]} in the artifact store {self.name} is damaged",
                hint="push the environment again: that mends it",
            )
        if held:
            yield held

    async def read(
        self,
        digest: str,
        *,
        limit_bytes: int = MAX_ARCHIVE_BYTES,
        on_progress: OnProgress | None = None,
    ) -> bytes:
        """Return an artifact's bytes.

        Raises:
            ArtifactNotFound: There is none.
            ArtifactTooLarge: It has more than `limit_bytes`.
            ArtifactDamaged: It is not what its name says.
        """
        _check_limit(await self.size(digest), limit_bytes)
        return b"".join([piece async for piece in self.open(digest, on_progress=on_progress)])

    async def size(self, digest: str) -> int:
        """Return how many bytes an artifact has.

        Raises:
            ArtifactNotFound: There is none.
        """
        _check(digest)
        size = await self._run(self._files.size, digest)
        if size is None:
            raise missing(self.name, digest)
        return size

    async def exists(self, digest: str) -> bool:
        """Whether there is an artifact of that name."""
        _check(digest)
        return await self._run(self._files.size, digest) is not None

    async def delete(self, digest: str) -> None:
        """Delete an artifact; one that is not there does nothing."""
        _check(digest)
        await self._run(self._files.delete, digest)

    def close(self) -> None:
        """Let its threads end; what is under way goes on to its end."""
        self._threads.shutdown(wait=False)

    async def _run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))
        except TimeoutError:
            raise FabricUnavailable(
                f"the artifact store {self.name} did not answer within {DEADLINE_S:g} s",
                hint="is it up, and does the network reach it?",
            ) from None


async def _pieces(data: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield pieces of `PIECE_BYTES`, the last one smaller."""
    if isinstance(data, bytes):
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
        return
    waiting = bytearray()
    async for piece in data:
        waiting += piece
        while len(waiting) >= PIECE_BYTES:
            yield bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
    if waiting:
        yield bytes(waiting)


def _check(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(
            f"{digest[:80]!r} names no artifact", hint="it is 64 digits of a SHA-256, in lower case"
        )


def _check_limit(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise ArtifactTooLarge(
            f"an artifact may have {limit_bytes >> 20} MiB ({limit_bytes} bytes), not more",
            hint="keep data sets out of the project: put them in an image or a volume",
        )


def open_artifact_store(settings: Settings, clock: Clock | None = None) -> ArtifactStore:
    """Return the store that ``AENV_ARTIFACTS_URL`` names, by default below the data directory.

    Raises:
        ConfigError: The URL's protocol is unknown, or its package is missing.
    """
    url = settings.artifacts_url
    directory = settings.data_dir / "artifacts" if url is None else _directory(url)
    if directory is not None:
        return ArtifactStore(DirectoryFiles(directory, clock or SystemClock()))
    assert url is not None
    return ArtifactStore(UrlFiles(url))


def _directory(url: str) -> Path | None:
    """Return the directory that a path or a ``file:`` URL names; None for other URLs."""
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        return Path(unquote(parts.netloc + parts.path))
    return None if "://" in url else Path(url).expanduser()
