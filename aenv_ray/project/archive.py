"""A project's archive: an uncompressed tar, the same bytes for the same digest, and its extraction.

Whoever unpacks an archive may not trust who made it: nothing is written outside of the directory,
and what is written is what the digest says, or nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aenv_ray.errors import ConfigError, boundary
from aenv_ray.project.files import FileRow, content_of, digested

MAX_ARCHIVE_BYTES: Final = 256 * 1024 * 1024
"""A larger project carries data that belongs into an image or a volume."""
MAX_FILES: Final = 20_000
"""A project with more holds packages or data."""
MAX_DEPTH: Final = 200
"""Directories within each other in an archive; walking many more exhausts Python's stack."""
_FILE: Final = stat.S_IFREG | 0o644
_PROGRAM: Final = stat.S_IFREG | 0o755
_LINK: Final = stat.S_IFLNK | 0o777


class Member(NamedTuple):
    """One file or symlink of an archive."""

    name: str
    mode: int
    """As `os.stat` tells kind and permissions; of those only whether it is a program."""
    content: bytes
    """Of a symlink, where it leads."""


class Archived(NamedTuple):
    """An archive, and the digest of what is in it."""

    data: bytes
    digest: str


def pack(root: Path, rows: Iterable[FileRow]) -> Archived:
    """Archive a project's files as they are now; one that is gone by then is part of the digest.

    Args:
        root: The project's directory.
        rows: Its files, sorted by name.

    Raises:
        ConfigError: They are too many, too large, or cannot be read; the message says which.
    """
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for count, row in enumerate(rows, 1):
            path = os.path.join(root, row.name)
            try:
                status = os.lstat(path)
                check_size(f"project {root}", buffer.tell() + status.st_size, count)
                content = content_of(path, status.st_mode)
            except FileNotFoundError:
                digest.update(b"removed")
                break
            digest.update(digested(row.name, status.st_mode, content))
            digest.update(content)
            tar.addfile(*_tar_member(row.name, status.st_mode, content))
    return Archived(buffer.getvalue(), digest.hexdigest())


def _tar_member(name: str, mode: int, content: bytes) -> tuple[tarfile.TarInfo, io.BytesIO | None]:
    """Return a file's member of an archive: nobody's, of no time."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    if stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return info, None
    info.size = len(content)
    return info, io.BytesIO(content)


def check_size(what: str, size_bytes: int, files: int) -> None:
    """Refuse what is larger than a project may be.

    Args:
        what: For the message: ``project /path``, ``the archive``.
        size_bytes: Of all its files.
        files: How many.

    Raises:
        ConfigError: It is too large; the message says by which limit.
    """
    if size_bytes > MAX_ARCHIVE_BYTES:
        raise ConfigError(
            f"{what} is over {MAX_ARCHIVE_BYTES >> 20} MiB",
            hint="keep data sets out of it: put them in an image or a volume, and their names in "
            ".aenvignore",
        )
    if files > MAX_FILES:
        raise ConfigError(
            f"{what} holds more than {MAX_FILES} files",
            hint="name the directories that are no source in .aenvignore",
        )


# --- reading --------------------------------------------------------------------------------------


class CarefulTarInfo(tarfile.TarInfo):
    """A member of an archive that somebody else made."""

    def _block(self, count: int) -> int:
        # A negative size sends older Pythons round in circles (CVE-2025-8194).
        if count < 0:
            raise tarfile.ReadError("a member has a negative size")
        return super()._block(count)  # type: ignore[misc,no-any-return]


def read_tar(tar: tarfile.TarFile, what: str) -> Iterator[Member]:
    """Yield the files and symlinks of a tar, none of which leads out; directories are left out.

    Args:
        tar: Opened with `CarefulTarInfo`; its total size is bounded by whoever opened it.
        what: For messages.

    Raises:
        ConfigError: A member is of another kind, or they are too many or too large.
    """
    size = 0
    for count, info in enumerate(tar, 1):
        size += info.size
        check_size(what, size, count)
        if info.isdir():
            continue
        if info.issym():
            yield Member(info.name, _LINK, os.fsencode(info.linkname))
            continue
        file = tar.extractfile(info) if info.isreg() and not info.issparse() else None
        if file is None:
            raise ConfigError(f"{what}: {info.name!r} is no file, directory or symlink")
        content = file.read()
        if len(content) != info.size:
            raise ConfigError(f"{what} ends within {info.name!r}")
        yield Member(info.name, _PROGRAM if info.mode & stat.S_IXUSR else _FILE, content)


def write_members(members: Iterable[Member], directory: Path, what: str) -> None:
    """Write members into an empty directory; readable by everybody, as sandboxes need it.

    Args:
        members: In any order.
        directory: Exists and is empty.
        what: For messages.

    Raises:
        ConfigError: One would be written or lead outside of the directory, or there are two of a
            name, or it cannot be written. Some may be written by then: remove the directory.
    """
    links: set[str] = set()
    for member in members:
        name = member.name
        parts = name.split("/")
        if posixpath.normpath(name) != name or name.startswith("/") or parts[0] in ("..", "."):
            raise ConfigError(f"{what}: {name!r} would escape its directory")
        if len(parts) > MAX_DEPTH:
            shown = f"{name[:40]}…"
            raise ConfigError(f"{what}: {shown!r} lies deeper than {MAX_DEPTH} directories")
        if any("/".join(parts[:end]) in links for end in range(1, len(parts))):
            raise ConfigError(f"{what}: {name!r} lies behind a symlink")
        if stat.S_ISLNK(member.mode):
            _check_link(name, os.fsdecode(member.content), what)
            links.add(name)
        try:
            _make_directories(directory, parts[:-1])
            _write(directory / name, member)
        except OSError as exc:
            raise ConfigError(f"{what}: {name!r} cannot be written: {exc.strerror}") from exc
    top = os.path.realpath(directory)
    for name in sorted(links):
        # A link may lead out by another one's help.
        target = os.path.realpath(os.path.join(top, name))
        if target != top and not target.startswith(top + os.sep):
            raise ConfigError(f"{what}: the symlink {name!r} would escape its directory")


def _write(path: Path, member: Member) -> None:
    if stat.S_ISLNK(member.mode):
        os.symlink(member.content, os.fsencode(path))
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags), "wb") as file:
        os.fchmod(file.fileno(), stat.S_IMODE(member.mode))
        file.write(member.content)


def _make_directories(directory: Path, parts: list[str]) -> None:
    for part in parts:
        directory = directory / part
        if not directory.is_dir():
            directory.mkdir()
            directory.chmod(0o755)


def _check_link(name: str, target: str, what: str) -> None:
    """Refuse a symlink that leads out by its own words."""
    if posixpath.isabs(target):
        raise ConfigError(f"{what}: the symlink {name!r} would escape its directory")
    led = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if led.split("/")[0] == "..":
        raise ConfigError(f"{what}: the symlink {name!r} would escape its directory")


def unpack(archive: bytes, digest: str, directory: Path) -> Path:
    """Unpack an archive into ``directory/digest`` once; a later call returns it at once.

    The files are written beside it and renamed, so a crash leaves no half project, and two
    processes may do it at the same time.

    Raises:
        ConfigError: The archive is damaged, would escape its directory, is too large, or holds
            something else than the digest says.
    """
    target = directory / digest
    if target.is_dir():
        return target
    what = f"project archive {digest[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".unpack-") as partial:
        content = Path(partial, "content")
        content.mkdir()
        content.chmod(0o755)
        found = hashlib.sha256()
        with (
            boundary(ConfigError, what),
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:", tarinfo=CarefulTarInfo) as tar,
        ):
            write_members(_hashed(read_tar(tar, what), found, what), content, what)
        if found.hexdigest() != digest:
            raise ConfigError(f"{what} holds something else: {found.hexdigest()[:12]}")
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    return target


def _hashed(members: Iterable[Member], digest: hashlib._Hash, what: str) -> Iterator[Member]:
    """Yield members that are sorted by name, and add them to a digest."""
    last = ""
    for member in members:
        if member.name <= last:
            raise ConfigError(f"{what}: {member.name!r} is not in its place")
        last = member.name
        digest.update(digested(member.name, member.mode, member.content))
        digest.update(member.content)
        yield member
