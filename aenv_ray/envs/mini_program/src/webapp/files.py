"""The files of an application: a small file system below one real directory.

Paths are resolved segment by segment without following symbolic links, so no path leaves the
directory, whatever a program has put into it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_FILES: Final = 200
MAX_FILE_BYTES: Final = 1024 * 1024
MAX_TOTAL_BYTES: Final = 8 * 1024 * 1024
MAX_DEPTH: Final = 8
MAX_NAME_CHARACTERS: Final = 100

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}


class FileProblem(ValueError):
    """A path or file cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Entry:
    """A file of the application.

    Attributes:
        path: Relative to the application's directory, with ``/``.
        size_bytes: Size of its content.
    """

    path: str
    size_bytes: int


class AppFiles:
    """The files below one directory, limited in number and size.

    The directory is created by the first write. Methods may be called from several threads.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.RLock()

    def write(self, path: str, content: bytes) -> Entry:
        """Write a file, and create its directories.

        Raises:
            FileProblem: The path is invalid, is a directory, or a limit would be exceeded.
        """
        *parents, name = _segments(path)
        with self._lock:
            self._check_limits(path, len(content))
            with self._directory(parents, create=True) as directory:
                _write(directory, name, content, path)
        return Entry("/".join([*parents, name]), len(content))

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileProblem: It does not exist, is not a regular file, or exceeds `MAX_FILE_BYTES`.
        """
        *parents, name = _segments(path)
        with self._directory(parents) as directory:
            return _read(directory, name, path)

    def list(self, directory: str = "/") -> list[Entry]:
        """Return the regular files below a directory, sorted by path.

        Raises:
            FileProblem: The directory does not exist, or there are more than `MAX_FILES` entries.
        """
        parts = _segments(directory, may_be_root=True)
        if not parts and not os.path.lexists(self._root):
            return []
        with self._directory(parts) as opened:
            return sorted(_walk(opened, parts), key=lambda entry: entry.path)

    def snapshot(self) -> dict[str, bytes]:
        """Return the content of all files by path.

        Raises:
            FileProblem: There are more files than allowed, or larger ones.
        """
        found: dict[str, bytes] = {}
        for entry in self.list():
            found[entry.path] = self.read(entry.path)
            if sum(map(len, found.values())) > MAX_TOTAL_BYTES:
                raise FileProblem(f"the files exceed {MAX_TOTAL_BYTES} bytes in total")
        return found

    def delete(self, path: str) -> int:
        """Delete a file, or a directory with what it contains; return the number of files.

        Raises:
            FileProblem: It does not exist.
        """
        *parents, name = _segments(path)
        with self._lock, self._directory(parents) as directory:
            return _delete(directory, name, path)

    def move(self, source: str, destination: str) -> None:
        """Move a file or directory to a path that does not exist yet.

        Raises:
            FileProblem: `source` does not exist, `destination` exists, or a path is invalid.
        """
        *old_parents, old = _segments(source)
        *new_parents, new = _segments(destination)
        if [*new_parents, new][: len(old_parents) + 1] == [*old_parents, old]:
            raise FileProblem(f"{source} cannot be moved into itself: {destination}")
        with self._lock, self._directory(old_parents) as here:
            _kind(here, old, source)
            with self._directory(new_parents, create=True) as there:
                if _exists(there, new):
                    raise FileProblem(f"{destination} exists; delete it first")
                os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)

    @contextmanager
    def _directory(self, parts: list[str], *, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of a directory below the root."""
        if create:
            with suppress(FileExistsError):
                self._root.mkdir()
        with _problems("/".join(parts) or "/"):
            opened = os.open(self._root, _DIRECTORY)
        try:
            for number, part in enumerate(parts, 1):
                with _problems("/".join(parts[:number])):
                    if create and not _exists(opened, part):
                        os.mkdir(part, dir_fd=opened)
                    deeper = os.open(part, _DIRECTORY, dir_fd=opened)
                os.close(opened)
                opened = deeper
            yield opened
        finally:
            os.close(opened)

    def _check_limits(self, path: str, size_bytes: int) -> None:
        if size_bytes > MAX_FILE_BYTES:
            raise FileProblem(
                f"{path} would have {size_bytes} bytes; a file may have {MAX_FILE_BYTES}"
            )
        name = "/".join(_segments(path))
        others = [entry for entry in self.list() if entry.path != name]
        if len(others) >= MAX_FILES:
            raise FileProblem(f"there are {MAX_FILES} files, the limit; delete some before {path}")
        total = size_bytes + sum(entry.size_bytes for entry in others)
        if total > MAX_TOTAL_BYTES:
            raise FileProblem(
                f"with {path} the files would have {total} bytes; the limit is {MAX_TOTAL_BYTES}"
            )


def _segments(path: str, *, may_be_root: bool = False) -> list[str]:
    """Return the segments of a path; a leading ``/`` means the application's directory.

    Raises:
        FileProblem: It is empty or too deep, or a segment is ``..`` or is not a plain name.
    """
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if not parts and not may_be_root:
        raise FileProblem(f"path {path!r} names no file")
    if len(parts) > MAX_DEPTH:
        raise FileProblem(f"path {path!r} has more than {MAX_DEPTH} segments")
    for part in parts:
        if part == "..":
            raise FileProblem(f"path {path!r} contains '..'; paths are relative to the application")
        if not part.isprintable() or "\\" in part or len(part) > MAX_NAME_CHARACTERS:
            raise FileProblem(
                f"path {path!r} has the segment {part!r}: use at most {MAX_NAME_CHARACTERS} "
                "printable characters, without a backslash"
            )
    return parts


@contextmanager
def _problems(path: str) -> Iterator[None]:
    """Raise errors of the file system as `FileProblem`, except if the machine lacks a resource."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _RESOURCES:
            raise
        is_link = exc.errno in {errno.ELOOP, errno.ENOTDIR}
        why = "is a symbolic link or not a directory" if is_link else os.strerror(exc.errno or 0)
        raise FileProblem(f"{path}: {why}") from None


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _kind(directory: int, name: str, path: str) -> int:
    """Return the mode of an entry, which is not a link's target's."""
    with _problems(path):
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode


def _read(directory: int, name: str, path: str) -> bytes:
    with _problems(path):
        # A named pipe must not block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = os.open(name, flags, dir_fd=directory)
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise FileProblem(f"{path} is not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise FileProblem(f"{path} exceeds {MAX_FILE_BYTES} bytes")
    return content


def _write(directory: int, name: str, content: bytes, path: str) -> None:
    """Replace a file in one step, so that a reader sees the old or the new content."""
    if _exists(directory, name) and stat.S_ISDIR(_kind(directory, name, path)):
        raise FileProblem(f"{path} is a directory")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    temporary = f".{secrets.token_hex(8)}.tmp"
    with _problems(path):
        opened = os.open(temporary, flags, 0o644, dir_fd=directory)
        try:
            with open(opened, "wb") as file:
                file.write(content)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            os.unlink(temporary, dir_fd=directory)
            raise


def _walk(directory: int, parts: list[str]) -> Iterator[Entry]:
    """Yield the regular files below an open directory; links are not followed and not listed."""
    seen = 0
    for top, names, files, opened in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        seen += len(names) + len(files)
        if seen > 2 * MAX_FILES:
            raise FileProblem(f"there are more than {2 * MAX_FILES} files and directories")
        below = [part for part in top.split("/") if part != "."]
        for name in files:
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Entry("/".join([*parts, *below, name]), status.st_size)


def _delete(directory: int, name: str, path: str) -> int:
    if not stat.S_ISDIR(_kind(directory, name, path)):
        with _problems(path):
            os.unlink(name, dir_fd=directory)
        return 1
    deleted = 0
    with _problems(path):
        for _, names, files, opened in os.fwalk(
            name, topdown=False, dir_fd=directory, follow_symlinks=False
        ):
            for one in files:
                os.unlink(one, dir_fd=opened)
            for one in names:
                if stat.S_ISDIR(_kind(opened, one, path)):
                    os.rmdir(one, dir_fd=opened)
                else:
                    os.unlink(one, dir_fd=opened)
            deleted += len(files)
        os.rmdir(name, dir_fd=directory)
    return deleted
