"""Where artifacts lie: a directory, or whatever fsspec reaches. Blocking; `artifacts` runs it.

Both keep a file per digest, and write it beside its place before it gets its name: what has a name
was written whole, whoever else wrote the same at the time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit, urlunsplit

from aenv_ray.clock import Clock
from aenv_ray.errors import (
    AenvError,
    ArtifactNotFound,
    ArtifactStoreDenied,
    ArtifactStoreFull,
    ConfigError,
    FabricUnavailable,
)

PARTIAL_AGE_S: Final = 24 * 3600.0
"""What lies unfinished for longer has lost its writer."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class Upload(ABC):
    """One file on its way in. Thread-safe: `abort` may come while `write` is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def write(self, piece: bytes) -> None:
        """Add to it; after `abort` nothing."""
        with self._lock:
            if not self._is_over:
                self._write(piece)

    def commit(self, digest: str) -> None:
        """Give it its name, whole; after `abort` nothing."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._commit(digest)

    def abort(self) -> None:
        """Leave nothing of it; after `commit` nothing."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._abort()

    @abstractmethod
    def _write(self, piece: bytes) -> None: ...

    @abstractmethod
    def _commit(self, digest: str) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...


class ArtifactFiles(ABC):
    """Files by digest.

    Each method may raise ArtifactStoreDenied, ArtifactStoreFull and FabricUnavailable.
    """

    name: str
    """For people: a path or a URL, without what is secret in it."""

    @abstractmethod
    def begin(self) -> Upload:
        """Begin to write a file."""

    @abstractmethod
    def read(self, digest: str, start: int, length: int) -> bytes:
        """Return a part of a file; less at its end.

        Raises:
            ArtifactNotFound: There is none.
        """

    @abstractmethod
    def size(self, digest: str) -> int | None:
        """Return how many bytes a file has; None when there is none."""

    @abstractmethod
    def delete(self, digest: str) -> None:
        """Delete a file; one that is not there does nothing."""


@contextlib.contextmanager
def _translated(name: str, secret: str = "") -> Iterator[None]:
    """Say what kept a store from doing its work, and nothing that is secret."""

    def words(exc: BaseException) -> str:
        text = f"{type(exc).__name__}: {exc}"
        return text.replace(secret, "…") if secret else text

    try:
        yield
    except AenvError:
        raise
    except Exception as exc:  # noqa: BLE001  # every file system has its own
        number = getattr(exc, "errno", None)
        if isinstance(exc, PermissionError) or number in _DENIED:
            raise ArtifactStoreDenied(
                f"the artifact store {name} refuses us: {words(exc)}",
                hint="look at the owner of the directory, or at the credentials of the URL",
            ) from None
        if number in _FULL:
            raise ArtifactStoreFull(
                f"the artifact store {name} is full: {words(exc)}",
                hint="make room there, or name another one with AENV_ARTIFACTS_URL",
            ) from None
        raise FabricUnavailable(
            f"the artifact store {name} cannot be reached: {words(exc)}",
            hint="is AENV_ARTIFACTS_URL right, and is it up?",
        ) from None


def missing(name: str, digest: str) -> ArtifactNotFound:
    """Return the error for an artifact that is not there."""
    return ArtifactNotFound(
        f"the artifact store {name} has no {digest[:12]}",
        hint="push the environment again; is AENV_ARTIFACTS_URL the one that it was pushed to?",
    )


# --- a directory ----------------------------------------------------------------------------------


class DirectoryFiles(ArtifactFiles):
    """Files in a directory of this machine, or one that machines share.

    Args:
        directory: Made at the first write.
        clock: By which unfinished files grow old.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.name = str(directory)
        self._directory = directory
        self._clock = clock

    def begin(self) -> Upload:  # noqa: D102
        with _translated(self.name):
            unfinished = self._directory / "unfinished"
            unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep(unfinished)
            fd, path = tempfile.mkstemp(dir=unfinished)
            return _FileUpload(self, os.fdopen(fd, "wb"), Path(path))

    def _sweep(self, unfinished: Path) -> None:
        oldest = self._clock.now() - PARTIAL_AGE_S
        for path in unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()

    def path(self, digest: str) -> Path:
        """Return where a file is, or would be."""
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


class _FileUpload(Upload):
    def __init__(self, files: DirectoryFiles, file: BinaryIO, path: Path) -> None:
        super().__init__()
        self._files = files
        self._file = file
        self._path = path

    def _write(self, piece: bytes) -> None:
        with _translated(self._files.name):
            self._file.write(piece)

    def _commit(self, digest: str) -> None:
        target = self._files.path(digest)
        try:
            with _translated(self._files.name):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.replace(self._path, target)
                _sync(target.parent)
                _sync(target.parent.parent)
        except AenvError:
            self._abort()
            raise

    def _abort(self) -> None:
        with _translated(self._files.name):
            try:
                self._file.close()
            finally:
                self._path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    """Have a directory's names survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- whatever fsspec reaches ----------------------------------------------------------------------


class UrlFiles(ArtifactFiles):
    """Files under a URL of a protocol that fsspec knows, such as ``s3://bucket/path``.

    Args:
        url: Credentials in it appear in no message.

    Raises:
        ConfigError: The protocol is unknown, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.name = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        self._secret = parts.netloc.rpartition("@")[0]
        import fsspec

        with self.translated():
            try:
                self._fs, self._root = fsspec.core.url_to_fs(url)
            except (ImportError, ValueError, TypeError) as exc:
                words = str(exc).replace(self._secret or url, "…")
                raise ConfigError(
                    f"AENV_ARTIFACTS_URL {self.name}: {words}",
                    hint="name a directory, or install the package of the protocol "
                    "(s3fs, gcsfs, adlfs …) where the gateway runs",
                ) from None

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    def path(self, digest: str) -> str:
        """Return a file's path in its file system."""
        return self._path(digest[:2], digest)

    def begin(self) -> Upload:  # noqa: D102
        path = self._path("unfinished", uuid.uuid4().hex)
        with self.translated():
            self._fs.makedirs(self._path("unfinished"), exist_ok=True)
            return _UrlUpload(self, self._fs, self._fs.open(path, "wb"), path)

    def read(self, digest: str, start: int, length: int) -> bytes:  # noqa: D102
        with self.translated():
            try:
                return bytes(self._fs.cat_file(self.path(digest), start, start + length))
            except FileNotFoundError:
                raise missing(self.name, digest) from None

    def size(self, digest: str) -> int | None:  # noqa: D102
        with self.translated():
            # Somebody else may have written or deleted it since we looked.
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self.path(digest))["size"])
            except FileNotFoundError:
                return None

    def delete(self, digest: str) -> None:  # noqa: D102
        with self.translated(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self.path(digest))

    def translated(self) -> contextlib.AbstractContextManager[None]:
        """Attribute what goes wrong in the block to this store."""
        return _translated(self.name, self._secret)


class _UrlUpload(Upload):
    def __init__(self, files: UrlFiles, fs: Any, file: Any, path: str) -> None:
        super().__init__()
        self._files = files
        self._fs = fs
        self._file = file
        self._path = path

    def _write(self, piece: bytes) -> None:
        with self._files.translated():
            self._file.write(piece)

    def _commit(self, digest: str) -> None:
        target = self._files.path(digest)
        try:
            with self._files.translated():
                self._file.close()
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._fs.mv(self._path, target)
        except AenvError:
            self._abort()
            raise

    def _abort(self) -> None:
        with self._files.translated():
            try:
                self._file.close()
            finally:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path)
