"""A project's archive: an uncompressed tar with the same bytes for the same digest.

Archives may come from untrusted sources: extraction writes nothing outside the target directory,
and nothing that does not match the digest.
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
from aenv_ray.files import make_private
from aenv_ray.project.files import FileRow, content_of, digested

MAX_ARCHIVE_BYTES: Final = 256 * 1024 * 1024
"""Larger data belongs in an image or a volume."""
MAX_FILES: Final = 20_000
"""A project with more files contains packages or data."""
MAX_DEPTH: Final = 200
"""Maximum depth of directories; walking many more exhausts Python's stack."""
_FILE: Final = stat.S_IFREG | 0o644
_PROGRAM: Final = stat.S_IFREG | 0o755
_LINK: Final = stat.S_IFLNK | 0o777


class Member(NamedTuple):
    """One file or symlink of an archive."""

    name: str
    mode: int
    """File type as in `os.stat`, and whether it is executable."""
    content: bytes
    """For a symlink, its target."""


class Archived(NamedTuple):
    """An archive and the digest of its content."""

    data: bytes
    digest: str


def pack(root: Path, rows: Iterable[FileRow]) -> Archived:
    """Archive a project's files as they are now; a removed file changes the digest.

    Args:
        root: The project's directory.
        rows: Its files, sorted by name.

    Raises:
        ConfigError: There are too many, they are too large, or one cannot be read.
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
    """Return a file's tar member, without owner and times."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    if stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(content)
        return info, None
    info.size = len(content)
    return info, io.BytesIO(content)


def check_size(what: str, size_bytes: int, files: int) -> None:
    """Check the size limits of a project.

    Args:
        what: Name in messages: ``project /path``, ``the archive``.
        size_bytes: Total size of its files.
        files: Number of files.

    Raises:
        ConfigError: A limit is exceeded.
    """
    if size_bytes > MAX_ARCHIVE_BYTES:
        raise ConfigError(
            f"{what} is over {MAX_ARCHIVE_BYTES >> 20} MiB",
            hint="put data sets in an image or a volume, and list them in .aenvignore",
        )
    if files > MAX_FILES:
        raise ConfigError(
            f"{what} has more than {MAX_FILES} files",
            hint="list directories that are not source code in .aenvignore",
        )


# --- reading --------------------------------------------------------------------------------------


class CarefulTarInfo(tarfile.TarInfo):
    """A tar member from an untrusted source."""

    def _block(self, count: int) -> int:
        # A negative size makes older Pythons loop forever (CVE-2025-8194).
        if count < 0:
            raise tarfile.ReadError("a member has a negative size")
        return super()._block(count)  # type: ignore[misc,no-any-return]


def read_tar(tar: tarfile.TarFile, what: str) -> Iterator[Member]:
    """Yield the files and symlinks of a tar; directories are skipped.

    Args:
        tar: Opened with `CarefulTarInfo`, with a bounded size.
        what: Name in messages.

    Raises:
        ConfigError: A member is of another type, or there are too many, or they are too large.
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
            raise ConfigError(
                f"{what}: {info.name!r} is not a file, directory or symlink",
                hint="pack files, directories and symlinks only",
            )
        content = file.read()
        if len(content) != info.size:
            raise ConfigError(
                f"{what} ends within {info.name!r}",
                hint="the archive is damaged: pack and upload it again",
            )
        yield Member(info.name, _PROGRAM if info.mode & stat.S_IXUSR else _FILE, content)


def write_members(members: Iterable[Member], directory: Path, what: str) -> None:
    """Write members into an empty directory, readable for all users, as sandboxes need.

    Args:
        members: The members, in any order.
        directory: An existing, empty directory.
        what: Name in messages.

    Raises:
        ConfigError: A member is outside the directory or leads out of it, has the name of another,
            or cannot be written. The directory may have some members then; remove it.
    """
    links: set[str] = set()
    for member in members:
        name = member.name
        parts = name.split("/")
        if posixpath.normpath(name) != name or name.startswith("/") or parts[0] in ("..", "."):
            raise ConfigError(
                f"{what}: {name!r} would escape its directory",
                hint="pack with paths relative to the project",
            )
        if len(parts) > MAX_DEPTH:
            shown = f"{name[:40]}…"
            raise ConfigError(
                f"{what}: {shown!r} is more than {MAX_DEPTH} directories deep",
                hint="flatten the project",
            )
        if any("/".join(parts[:end]) in links for end in range(1, len(parts))):
            raise ConfigError(
                f"{what}: {name!r} is below a symlink",
                hint="pack the directory, or the symlink to it, but not both",
            )
        if stat.S_ISLNK(member.mode):
            _check_link(name, os.fsdecode(member.content), what)
            links.add(name)
        try:
            _make_directories(directory, parts[:-1])
            _write(directory / name, member)
        except OSError as exc:
            raise ConfigError(
                f"{what}: {name!r} cannot be written: {exc.strerror}",
                hint="the node's disk may be full, or the name too long for its file system",
            ) from exc
    top = os.path.realpath(directory)
    for name in sorted(links):
        # Symlinks can lead out in combination.
        target = os.path.realpath(os.path.join(top, name))
        if target != top and not target.startswith(top + os.sep):
            raise ConfigError(
                f"{what}: the symlink {name!r} would escape its directory",
                hint="use a relative symlink to a file in the project",
            )


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
    """Refuse a symlink whose target is outside the directory."""
    if posixpath.isabs(target):
        raise ConfigError(
            f"{what}: the symlink {name!r} would escape its directory",
            hint="use a relative symlink to a file in the project",
        )
    led = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if led.split("/")[0] == "..":
        raise ConfigError(
            f"{what}: the symlink {name!r} would escape its directory",
            hint="use a relative symlink to a file in the project",
        )


def unpack(archive: bytes, digest: str, directory: Path) -> Path:
    """Unpack an archive into ``directory/digest``, unless it exists.

    The files are written to a temporary directory that is renamed, so a crash leaves no partial
    project, and processes may do this concurrently.

    Raises:
        ConfigError: The archive is damaged, would escape its directory, is too large, or has
            another digest.
    """
    target = directory / digest
    if target.is_dir():
        return target
    what = f"project archive {digest[:12]}"
    make_private(directory, close=True)
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
            raise ConfigError(
                f"{what} has another digest: {found.hexdigest()[:12]}",
                hint="the archive was damaged or changed: send it again",
            )
        try:
            content.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first
                raise
    return target


def _hashed(members: Iterable[Member], digest: hashlib._Hash, what: str) -> Iterator[Member]:
    """Yield members, check that they are sorted by name, and add them to a digest."""
    last = ""
    for member in members:
        if member.name <= last:
            raise ConfigError(
                f"{what}: {member.name!r} is not sorted by name",
                hint="pack projects with: aenv push",
            )
        last = member.name
        digest.update(digested(member.name, member.mode, member.content))
        digest.update(member.content)
        yield member
