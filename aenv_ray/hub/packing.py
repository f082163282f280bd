"""Packs projects for publishing, refuses secrets, and unpacks archives that others made.

The archive is that of `aenv_ray.project.project.Project.archive`, so a published version is byte by
byte what a local create of the same directory runs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Final, NamedTuple

from aenv_ray.errors import ConfigError, boundary
from aenv_ray.files import make_private
from aenv_ray.project import archive as project_archive
from aenv_ray.project import project
from aenv_ray.project.archive import CarefulTarInfo, Member

_SHOWN: Final = 5
_GZIP: Final = b"\x1f\x8b"
_ZIP: Final = b"PK\x03\x04"
_READ_BYTES: Final = 1024 * 1024
_ZIP_END: Final = b"PK\x05\x06"
_ZIP64_END: Final = b"PK\x06\x07"
_ZIP_END_BYTES: Final = 22
_ZIP64_END_BYTES: Final = 20
_MAX_ZIP_COMMENT: Final = 65_536
_MAX_ZIP_LIST_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a zip's list of files: `zipfile` reads it whole, with 1 KiB for each entry."""


@dataclass(frozen=True)
class Package:
    """A packed project."""

    source: project.Project
    data: bytes
    """Its archive."""
    sha256: str
    """Digest of the archive, its name in the artifact store."""


def pack(source: project.Project, *, allow: Sequence[str] = ()) -> Package:
    """Pack a project, unless a file looks like a secret.

    Args:
        source: The project.
        allow: Paths or patterns, relative to the project, of files that may look like secrets, such
            as ``tests/*.pem``.

    Raises:
        ConfigError: A file looks like a secret, or the project is too large or was edited since it
            was loaded.
    """
    data = source.archive()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = project_archive.read_tar(tar, f"project {source.path}")
        found = [f for m in members if (f := looks_secret(m.name, m.content)) is not None]
    _refuse([f for f in found if not any(fnmatchcase(f.path, p) for p in allow)])
    return Package(source, data, hashlib.sha256(data).hexdigest())


def _refuse(findings: Sequence[SuspectedSecret]) -> None:
    """Raise an error if there are findings.

    Raises:
        ConfigError: It names the files, and none of their content.
    """
    if not findings:
        return
    shown = "; ".join(f"{finding.path} ({finding.reason})" for finding in findings[:_SHOWN])
    more = f", and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    raise ConfigError(
        f"nothing was published, because files look like secrets: {shown}{more}",
        hint=f"exclude them (echo {findings[0].path} >> .aenvignore), or allow each with "
        f"--allow-secret {findings[0].path}",
    )


# --- archives that others made --------------------------------------------------------------------


def unpack_any(data: bytes | Path, directory: Path) -> project.Project:
    """Unpack an untrusted archive of a project, and return the project.

    Args:
        data: A tar, a gzipped tar or a zip of the project's directory or of its contents, or the
            path of one.
        directory: Directory of unpacked projects, see `aenv_ray.project.project.unpack`.

    Returns:
        The project in `directory`, without the files that its ignore rules exclude.

    Raises:
        ConfigError: The format is unknown, a path leaves the directory, the archive is too large,
            or there is no project in it.
    """
    what = "the archive"
    make_private(directory, close=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".unpack-") as partial:
        content = Path(partial, "content")
        content.mkdir()
        if isinstance(data, bytes):
            archive = Path(partial, "archive")
            archive.write_bytes(data)
        else:
            archive = data
        with boundary(ConfigError, what):
            project_archive.write_members(_members(archive, Path(partial), what), content, what)
        source = _load(_top(content), what)
        unpacked = project.unpack(source.archive(), source.digest, directory)
    return project.Project(unpacked, source.config, source.digest)


def _load(directory: Path, what: str) -> project.Project:
    """Load an unpacked project; error messages name the archive."""
    if not (directory / project.CONFIG_NAME).is_file():
        raise ConfigError(
            f"{what} has no {project.CONFIG_NAME}",
            hint="archive the project's directory, or its contents",
        )
    try:
        return project.load(directory)
    except ConfigError as exc:
        words = exc.message.replace(f"{directory}/", "").replace(str(directory), what)
        raise ConfigError(f"{what}: {words}", hint=exc.hint) from None


def _top(content: Path) -> Path:
    """Return the project's directory: the archive's only entry, or else the archive itself."""
    entries = list(content.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
        return entries[0]
    return content


def _members(archive: Path, scratch: Path, what: str) -> Iterator[Member]:
    with archive.open("rb") as file:
        head = file.read(4)
    if head.startswith(_ZIP):
        return _of_zip(archive, what)
    if head.startswith(_GZIP):
        archive = _unzipped(archive, scratch / "unzipped", what)
    return _of_tar(archive, what)


def _unzipped(archive: Path, target: Path, what: str) -> Path:
    """Decompress a gzip file, up to the size limit of a project."""
    size = 0
    try:
        with gzip.open(archive) as packed, target.open("wb") as file:
            while piece := packed.read(_READ_BYTES):
                size += len(piece)
                project_archive.check_size(what, size - _READ_BYTES, 0)  # without tar's overhead
                file.write(piece)
    except EOFError:
        raise ConfigError(f"{what} is truncated", hint="send it again") from None
    return target


def _of_tar(archive: Path, what: str) -> Iterator[Member]:
    with tarfile.open(archive, mode="r:", tarinfo=CarefulTarInfo) as tar:
        for member in project_archive.read_tar(tar, what):
            yield member._replace(name=member.name.removeprefix("./"))


def _of_zip(path: Path, what: str) -> Iterator[Member]:
    _check_zip_list(path, what)
    size = 0
    with zipfile.ZipFile(path) as archive:
        for count, info in enumerate(archive.infolist(), 1):
            size += info.file_size
            project_archive.check_size(what, size, count)
            if info.is_dir():
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ConfigError(
                    f"{what}: {info.filename!r} is compressed by an unusual method",
                    hint="use deflate, which is the default of zip programs, or send a tar",
                )
            with archive.open(info) as file:
                content = _exactly(file, info.file_size, what)
            yield _zip_member(info, content, what)


def _check_zip_list(path: Path, what: str) -> None:
    """Check the size of a zip's list of files, before it is read.

    Raises:
        ConfigError: It is too large, or has the format for zips of more than 4 GiB.
    """
    with path.open("rb") as file:
        length = file.seek(0, io.SEEK_END)
        file.seek(max(0, length - _MAX_ZIP_COMMENT - _ZIP_END_BYTES - _ZIP64_END_BYTES))
        tail = file.read()
    # As `zipfile` finds it: at the very end, or else the last one before a comment.
    start = len(tail) - _ZIP_END_BYTES
    if not tail[start:].startswith(_ZIP_END):
        start = tail.rfind(_ZIP_END)
    list_bytes = int.from_bytes(tail[start + 12 : start + 16], "little")
    has_zip64 = tail[max(0, start - _ZIP64_END_BYTES) :].startswith(_ZIP64_END)
    if list_bytes > _MAX_ZIP_LIST_BYTES or has_zip64:
        raise ConfigError(
            f"{what} is a zip with too many files",
            hint="list directories that are not source code in .aenvignore, or send a tar",
        )


def _exactly(file: IO[bytes], size: int, what: str) -> bytes:
    """Return the content of a file, and check its listed size, which may be wrong."""
    content = file.read(size + 1)
    if len(content) != size:
        raise ConfigError(
            f"{what} has a file whose size differs from the listed one",
            hint="the archive is damaged: pack and upload it again",
        )
    return content


def _zip_member(info: zipfile.ZipInfo, content: bytes, what: str) -> Member:
    mode = info.external_attr >> 16  # where Unix programs store it
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFLNK):
        raise ConfigError(
            f"{what}: {info.filename!r} is not a file, directory or symlink",
            hint="pack files, directories and symlinks only",
        )
    kind = stat.S_IFLNK if stat.S_ISLNK(mode) else stat.S_IFREG
    permissions = 0o755 if mode & stat.S_IXUSR else 0o644
    return Member(info.filename.removeprefix("./"), kind | permissions, content)


# --- files that look like secrets -----------------------------------------------------------------

_NAMES: Final = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".htpasswd", ".git-credentials",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.ppk", "*.kdbx", "credentials.json", "client_secret*.json",
    "service-account*.json", "service_account*.json", ".dockercfg", "kubeconfig", "*.kubeconfig",
)  # fmt: skip
_PATHS: Final = (
    ".aws/credentials", ".ssh/*", ".docker/config.json", ".kube/config", ".config/gcloud/*",
    ".huggingface/token", ".config/gh/hosts.yml",
)  # fmt: skip
_EXAMPLES: Final = ("*.example", "*.sample", "*.template", "*.dist", "*.example.*", "*.pub")
_HEAD_BYTES: Final = 256 * 1024
"""How much of a file is searched; tokens and keys are usually in small files."""


class SuspectedSecret(NamedTuple):
    """A file that looks like a secret."""

    path: str
    reason: str
    """Why; never its content (invariant 10)."""


# A publisher chooses what is searched. So the time is linear: whitespace at the start of a line
# must not match line ends, or each of many empty lines is searched to the last of them.
_CONTENTS: Final = (
    (re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=:]"),
     "it contains a private key"),
    (re.compile(rb'"private_key"\s*:\s*"-----BEGIN'), "it contains a private key"),
    (re.compile(rb"(?m)^[ \t]*(?://[^#\s]*:_(?:authToken|auth|password)|_authToken)\s*=\s*[^\s$]"),
     "it contains an npm token"),
    (re.compile(rb"(?m)^[ \t]*password\s*[:=]\s*pypi-[A-Za-z0-9_-]{16}"),
     "it contains a PyPI token"),
    (re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "it contains an AWS access key"),
    (re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{40}"),
     "it contains a GitHub token"),
    (re.compile(rb"\bsk-(?:ant-|proj-)[A-Za-z0-9_-]{32}"), "it contains a model server API key"),
    (re.compile(rb"\bhf_[A-Za-z0-9]{34}\b"), "it contains a Hugging Face token"),
    (re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20}"), "it contains a Slack token"),
)  # fmt: skip


def looks_secret(path: str, content: bytes) -> SuspectedSecret | None:
    """Return why a file looks like a secret, or None.

    Args:
        path: Relative to the project, with ``/``.
        content: Its content, or at least the beginning.
    """
    name = path.rpartition("/")[2].lower()
    is_example = any(fnmatchcase(name, pattern) for pattern in _EXAMPLES)
    if not is_example:
        by_path = any(fnmatchcase(f"/{path.lower()}", f"*/{pattern}") for pattern in _PATHS)
        by_name = any(fnmatchcase(name, pattern) for pattern in _NAMES)
        if by_path or (by_name and not _is_public(name, content)):
            return SuspectedSecret(path, "files with this name contain secrets")
    head = content[:_HEAD_BYTES]
    for pattern, reason in _CONTENTS:
        if pattern.search(head):
            return SuspectedSecret(path, reason)
    return None


def _is_public(name: str, content: bytes) -> bool:
    """Whether a PEM file contains only public data such as certificates."""
    if not name.endswith((".pem", ".key")):
        return False
    return b"-----BEGIN " in content and b"PRIVATE KEY" not in content
