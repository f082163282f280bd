"""The artifact store: files named by the SHA-256 of their content.

The digest is checked when a file is written and again when it is read. A file gets its name only
once it is complete. Any number of processes may use a store at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Final, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.config import Settings
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    ArtifactNotFound,
    ArtifactStoreDenied,
    ArtifactStoreFull,
    ArtifactTooLarge,
    ConfigError,
    FabricUnavailable,
)
from aenv_ray.files import make_private
from aenv_ray.project.archive import MAX_ARCHIVE_BYTES

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 1024 * 1024
"""Size of a read or write; large enough that switching threads costs little."""
DEADLINE_S: Final = 60.0
"""Deadline of each read or write."""
PARTIAL_AGE_S: Final = 24 * 3600.0
"""An unfinished upload that is older than this has lost its writer."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_THREADS: Final = 8
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

OnTransfer = Callable[[int, int | None], None]
"""Called with the bytes done and the total, or None if the total is unknown."""

P = ParamSpec("P")
R = TypeVar("R")


class ArtifactStore:
    """Artifacts by digest.

    Each method may raise FabricUnavailable (the store cannot be reached; try again),
    ArtifactStoreDenied, ArtifactStoreFull, and ConfigError for an invalid digest. Methods may run
    concurrently in one event loop; a cancelled one leaves nothing behind.
    """

    def __init__(self, files: ArtifactFiles) -> None:
        self._files = files
        # Separate threads: a store that hangs must not block the default executor.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aenv-artifacts")

    @property
    def name(self) -> str:
        """Location of the store for people, without secrets."""
        return self._files.name

    @property
    def is_directory(self) -> bool:
        """Whether the store is a local directory, which other machines may not share."""
        return isinstance(self._files, DirectoryFiles)

    async def put(
        self,
        data: bytes | AsyncIterable[bytes],
        *,
        digest: str | None = None,
        limit_bytes: int = MAX_ARCHIVE_BYTES,
        on_progress: OnTransfer | None = None,
        before_commit: Callable[[str, int], Awaitable[object]] | None = None,
    ) -> str:
        """Store content and return its digest; an existing artifact is written again.

        Args:
            data: The content, or an iterator of pieces of any size.
            digest: The expected digest. None: any.
            limit_bytes: Largest allowed size.
            on_progress: Called after each piece.
            before_commit: Awaited with the digest and the size when all content is there, before
                the artifact exists. What it raises is raised here, and nothing is stored.

        Raises:
            ArtifactTooLarge: The content is larger; nothing is stored.
            ArtifactDamaged: The content has another digest; nothing is stored.
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
                    f"the content sent as {str(digest)[:12]} has digest {found.hexdigest()[:12]}: "
                    "it was damaged on the way, or the digest is wrong",
                    hint="send it again",
                )
            if before_commit is not None:
                await before_commit(found.hexdigest(), done)
            await self._run(upload.commit, found.hexdigest())
        except BaseException:
            try:
                await self._run(upload.abort)
            except AenvError as exc:
                logger.warning("an unfinished upload could not be deleted: %s", exc)
            raise
        return found.hexdigest()

    async def open(
        self, digest: str, *, on_progress: OnTransfer | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the content of an artifact in pieces; the last one after the digest was checked.

        Raises:
            ArtifactNotFound: It does not exist; raised before the first piece.
            ArtifactDamaged: Its digest is wrong; raised instead of the last piece.
        """
        total = await self.size(digest)
        found, done, held = hashlib.sha256(), 0, b""
        # A range that begins at the end of a file is an error for stores that speak HTTP.
        while done < total:
            piece = await self._run(self._files.read, digest, done, PIECE_BYTES)
            if not piece:
                break
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
                hint="push the environment again to repair it",
            )
        if held:
            yield held

    async def read(
        self,
        digest: str,
        *,
        limit_bytes: int = MAX_ARCHIVE_BYTES,
        on_progress: OnTransfer | None = None,
    ) -> bytes:
        """Return the content of an artifact.

        Raises:
            ArtifactNotFound: It does not exist.
            ArtifactTooLarge: It is larger than `limit_bytes`.
            ArtifactDamaged: Its digest is wrong.
        """
        _check_limit(await self.size(digest), limit_bytes)
        return b"".join([piece async for piece in self.open(digest, on_progress=on_progress)])

    async def size(self, digest: str) -> int:
        """Return the size of an artifact in bytes.

        Raises:
            ArtifactNotFound: It does not exist.
        """
        _check(digest)
        size = await self._run(self._files.size, digest)
        if size is None:
            raise missing(self.name, digest)
        return size

    async def exists(self, digest: str) -> bool:
        """Whether an artifact exists."""
        _check(digest)
        return await self._run(self._files.size, digest) is not None

    async def delete(self, digest: str) -> None:
        """Delete an artifact; idempotent."""
        _check(digest)
        await self._run(self._files.delete, digest)

    def close(self) -> None:
        """End its threads; operations under way are completed."""
        self._threads.shutdown(wait=False)

    async def _run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))
        except TimeoutError:
            raise FabricUnavailable(
                f"the artifact store {self.name} did not answer within {DEADLINE_S:g} s",
                hint="check that it is running and reachable",
            ) from None


async def _pieces(data: bytes | AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield pieces of `PIECE_BYTES`; the last one may be smaller."""
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


def is_digest(text: str) -> bool:
    """Whether a text can be the digest of an artifact."""
    return _DIGEST.fullmatch(text) is not None


def _check(digest: str) -> None:
    if not is_digest(digest):
        raise ConfigError(
            f"invalid artifact digest {digest[:80]!r}: expected 64 lower-case hexadecimal digits",
            hint="use the digest that the hub lists for the version",
        )


def _check_limit(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise ArtifactTooLarge(
            f"the artifact is larger than {limit_bytes >> 20} MiB ({limit_bytes} bytes)",
            hint="keep data sets out of the project: put them in an image or a volume",
        )


# --- files ----------------------------------------------------------------------------------------


class Upload:
    """A file that is being written. Thread-safe: `abort` may be called during `write`.

    `finish` closes the complete file and names it by its digest.
    """

    def __init__(
        self,
        file: IO[bytes],
        finish: Callable[[str], None],
        delete: Callable[[], None],
        translated: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._file = file
        self._finish = finish
        self._delete = delete
        self._translated = translated
        self._lock = threading.Lock()
        self._is_over = False

    def write(self, piece: bytes) -> None:
        """Append to the file; does nothing after `abort`."""
        with self._lock, self._translated():
            if not self._is_over:
                self._file.write(piece)

    def commit(self, digest: str) -> None:
        """Give the complete file its name; does nothing after `abort`."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            try:
                with self._translated():
                    self._finish(digest)
            except AenvError:
                self._discard()
                raise

    def abort(self) -> None:
        """Delete the file; does nothing after `commit`."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._discard()

    def _discard(self) -> None:
        with self._translated():
            try:
                self._file.close()
            finally:
                self._delete()


class ArtifactFiles(ABC):
    """Files named by digest; blocking.

    Each method may raise ArtifactStoreDenied, ArtifactStoreFull and FabricUnavailable.
    """

    name: str
    """A path or a URL without secrets, for people."""

    @abstractmethod
    def begin(self) -> Upload:
        """Start to write a file."""

    @abstractmethod
    def read(self, digest: str, start: int, length: int) -> bytes:
        """Return part of a file that begins before its end; at its end, less than `length`.

        Raises:
            ArtifactNotFound: It does not exist.
        """

    @abstractmethod
    def size(self, digest: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    @abstractmethod
    def delete(self, digest: str) -> None:
        """Delete a file; idempotent."""


@contextlib.contextmanager
def _translated(name: str, secret: str = "") -> Iterator[None]:
    """Translate the errors of a store, without the secret part of its URL."""

    def words(exc: BaseException) -> str:
        text = f"{type(exc).__name__}: {exc}"
        return text.replace(secret, "…") if secret else text

    try:
        yield
    except AenvError:
        raise
    except Exception as exc:  # noqa: BLE001  # each file system has its own exceptions
        number = getattr(exc, "errno", None)
        if isinstance(exc, PermissionError) or number in _DENIED:
            raise ArtifactStoreDenied(
                f"the artifact store {name} denies access: {words(exc)}",
                hint="check the owner of the directory, or the credentials in the URL",
            ) from None
        if number in _FULL:
            raise ArtifactStoreFull(
                f"the artifact store {name} is full: {words(exc)}",
                hint="free some space, or set AENV_ARTIFACTS_URL to another store",
            ) from None
        raise FabricUnavailable(
            f"the artifact store {name} cannot be reached: {words(exc)}",
            hint="check AENV_ARTIFACTS_URL, and that the store is running",
        ) from None


def missing(name: str, digest: str) -> ArtifactNotFound:
    """Return the error for an artifact that does not exist."""
    return ArtifactNotFound(
        f"the artifact store {name} has no artifact {digest[:12]}",
        hint="push the environment again, or set AENV_ARTIFACTS_URL to the store it was pushed to",
    )


# --- a directory ----------------------------------------------------------------------------------


class DirectoryFiles(ArtifactFiles):
    """Files in a directory, which machines may share.

    Args:
        directory: Created at the first write.
        clock: Clock for the age of unfinished files.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.name = str(directory)
        self._directory = directory
        self._clock = clock

    def begin(self) -> Upload:  # noqa: D102
        with _translated(self.name):
            unfinished = self._directory / "unfinished"
            make_private(unfinished)
            self._sweep(unfinished)
            fd, name = tempfile.mkstemp(dir=unfinished)
            file, path = os.fdopen(fd, "wb"), Path(name)

        def finish(digest: str) -> None:
            target = self.path(digest)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, target)
            _sync(target.parent)
            _sync(target.parent.parent)

        delete = partial(path.unlink, missing_ok=True)
        return Upload(file, finish, delete, partial(_translated, self.name))

    def _sweep(self, unfinished: Path) -> None:
        oldest = self._clock.now() - PARTIAL_AGE_S
        for path in unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def path(self, digest: str) -> Path:
        """Return the path of a file, whether it exists or not."""
        return self._directory / digest[:2] / digest

    def read(self, digest: str, start: int, length: int) -> bytes:  # noqa: D102
        with _translated(self.name):
            try:
                with self.path(digest).open("rb") as file:
                    return os.pread(file.fileno(), length, start)
            except FileNotFoundError:
                raise missing(self.name, digest) from None

    def size(self, digest: str) -> int | None:  # noqa: D102
        with _translated(self.name):
            try:
                return self.path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def delete(self, digest: str) -> None:  # noqa: D102
        with _translated(self.name):
            self.path(digest).unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    """Make the entries of a directory survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- fsspec ----------------------------------------------------------------------


class UrlFiles(ArtifactFiles):
    """Files under a URL that fsspec supports, such as ``s3://bucket/path``.

    Args:
        url: URL of the store; its credentials appear in no message.

    Raises:
        ConfigError: The protocol is unknown, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.name = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._secret = parts.netloc.rpartition("@")[0]
        import fsspec

        with self._translated():
            try:
                self._fs, self._root = fsspec.core.url_to_fs(url)
            except (ImportError, ValueError, TypeError) as exc:
                words = str(exc).replace(self._secret or url, "…")
                raise ConfigError(
                    f"AENV_ARTIFACTS_URL {self.name}: {words}",
                    hint="use a directory, or install the package for the protocol "
                    "(s3fs, gcsfs, adlfs …) on the nodes of the gateway",
                ) from None

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    def path(self, digest: str) -> str:
        """Return the path of a file in its file system."""
        return self._path(digest[:2], digest)

    def begin(self) -> Upload:  # noqa: D102
        path = self._path("unfinished", uuid.uuid4().hex)
        with self._translated():
            self._fs.makedirs(self._path("unfinished"), exist_ok=True)
            file = self._fs.open(path, "wb")

        def finish(digest: str) -> None:
            target = self.path(digest)
            file.close()
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.mv(path, target)

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        return Upload(file, finish, delete, self._translated)

    def read(self, digest: str, start: int, length: int) -> bytes:  # noqa: D102
        with self._translated():
            try:
                # By name: the file systems agree in nothing else about these arguments.
                piece = self._fs.cat_file(self.path(digest), start=start, end=start + length)
                return bytes(piece)
            except FileNotFoundError:
                raise missing(self.name, digest) from None

    def size(self, digest: str) -> int | None:  # noqa: D102
        with self._translated():
            # fsspec caches listings, and others may have written or deleted the file.
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self.path(digest))["size"])
            except FileNotFoundError:
                return None

    def delete(self, digest: str) -> None:  # noqa: D102
        with self._translated(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.path(digest))

    def _translated(self) -> AbstractContextManager[None]:
        return _translated(self.name, self._secret)


# --- the configured store -------------------------------------------------------------------------


def open_artifact_store(settings: Settings, clock: Clock | None = None) -> ArtifactStore:
    """Return the store of ``AENV_ARTIFACTS_URL``, by default in the data directory.

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
    """Return the directory of a path or a ``file:`` URL; None for other URLs."""
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        return Path(unquote(parts.netloc + parts.path))
    return None if "://" in url else Path(url).expanduser()
