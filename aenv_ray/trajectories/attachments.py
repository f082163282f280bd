"""Large observations of steps, such as images: named in records, and kept in files beside them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically
from aenv_ray.trajectories.schema import Attachment
from aenv_ray.trajectories.storable import storable_text

DIRECTORY: Final = "attachments"
"""Beside the records."""
TEXT_LIMIT: Final = 20_000
"""Maximum number of characters of a step's text in a record. A longer text is attached."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_MEDIA_TYPE: Final = re.compile(r"[A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,64}")
_UNKNOWN: Final = "application/octet-stream"


def attached(content: Iterable[Any], text: str) -> dict[Attachment, bytes]:
    """Return the attachments of a result, which are not in its record, with their contents.

    Args:
        content: MCP content blocks of the result, as the sandbox sent them.
        text: Their text.
    """
    found: dict[Attachment, bytes] = {}
    if len(text) > TEXT_LIMIT:
        data = storable_text(text).encode()
        found[attachment_of(data, "text/plain")] = data
    for block in content:
        if isinstance(block, Mapping) and block.get("type") != "text":
            inner = block.get("resource")
            part = inner if isinstance(inner, Mapping) else block
            data = _content(part)
            if data:
                found[attachment_of(data, part.get("mimeType"))] = data
    return found


def _content(part: Mapping[str, Any]) -> bytes:
    """Return the content of a block; empty if it has none."""
    encoded = part.get("data", part.get("blob"))
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return storable_text(encoded).encode()  # as it was sent
    text = part.get("text")
    return storable_text(text).encode() if isinstance(text, str) else b""


def attachment_of(data: bytes, media_type: Any) -> Attachment:
    """Return the record of an attachment; an invalid media type is replaced."""
    is_type = isinstance(media_type, str) and _MEDIA_TYPE.fullmatch(media_type)
    return Attachment(
        digest=f"sha256:{hashlib.sha256(data).hexdigest()}",
        size_bytes=len(data),
        media_type=str(media_type) if is_type else _UNKNOWN,
    )


class AttachmentFiles:
    """The attachments beside an output: a file for each digest.

    Several outputs in one directory, and several writers of one output, share the files.

    Args:
        output: The file or the directory of the records.
        is_directory: Whether `output` is a directory of shards.
    """

    def __init__(self, output: Path, *, is_directory: bool) -> None:
        self._directory = (output if is_directory else output.parent) / DIRECTORY

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write contents by digest; those that have a file are left alone.

        Raises:
            OSError: A file cannot be written, or the directory of the records is gone.
        """
        for digest, data in contents.items():
            path = self._path(digest)
            if not path.exists():
                self._directory.mkdir(exist_ok=True)
                write_atomically(path, data, mode=0o644)

    def read(self, digest: str) -> bytes:
        """Return the content of an attachment.

        Raises:
            ConfigError: There is none with this digest, or it has changed.
        """
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise ConfigError(
                f"the attachment {digest} cannot be read from {path}: {exc.strerror}",
                hint=f"keep the directory {DIRECTORY} beside the records",
            ) from exc
        if hashlib.sha256(data).hexdigest() != path.name:
            raise ConfigError(
                f"the attachment {path} does not have the content that its name says",
                hint="restore the file; it has been changed or cut",
            )
        return data

    def clear(self) -> None:
        """Delete all attachments, and nothing else in the directory.

        Raises:
            OSError: They cannot be deleted.
        """
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if _DIGEST.fullmatch(f"sha256:{path.name}"):
                    path.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise ConfigError(
                f"{digest!r} is not the digest of an attachment: `sha256:` and 64 hex digits",
                hint="pass the digest that the attachment has in its episode",
            )
        return self._directory / found[1]
