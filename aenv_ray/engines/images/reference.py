"""References to images: their grammar (https://github.com/distribution/reference) and parts."""

from __future__ import annotations

import re
from typing import Final

from aenv_ray.errors import ConfigError

HUB: Final = "docker.io"
"""The default registry."""
_LENGTH: Final = 255
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::\d+)?")
_WORD: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH: Final = re.compile(rf"{_WORD}(?:/{_WORD})*")
_ID: Final = re.compile(r"sha256:[0-9a-f]+")
_SHORT_ID: Final = re.compile(r"[0-9a-f]{1,64}")
_DIGEST: Final = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[0-9a-f]{32,}")
_TAG: Final = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


def compose(registry: str, namespace: str, name: str, tag: str) -> str:
    """Return ``registry/namespace/name:tag``.

    Args:
        registry: ``HOST[:PORT]``; "" for `HUB`.
        namespace: The namespace in the registry; "" for none.
        name: May contain slashes.
        tag: The tag of the image.

    Raises:
        ConfigError: A part is invalid; the message says which, the hint what is valid.
    """
    if registry and not _is_registry(registry):
        raise ConfigError(
            f"invalid registry {registry!r}",
            hint="write it as HOST.DOMAIN or HOST:PORT, without https:// and path",
        )
    for what, part in (("namespace", namespace), ("name", name)):
        if (part or what == "name") and not _PATH.fullmatch(part):
            raise ConfigError(
                f"invalid image {what} {part!r}",
                hint="use lower-case letters and digits, with . _ - or / between them",
            )
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f"invalid image tag {tag!r}",
            hint="use at most 128 letters, digits, _ . and -; set it with -t",
        )
    repository = "/".join(part for part in (registry, namespace, name) if part)
    if len(repository) > _LENGTH:
        raise ConfigError(
            f"image name {repository!r} has more than {_LENGTH} characters",
            hint="use a shorter name or namespace",
        )
    return f"{repository}:{tag}"


def split_tag(reference: str) -> tuple[str, str]:
    """Return repository and tag; ``latest`` if there is none."""
    head, slash, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", tag or "latest"


def is_valid(reference: str) -> bool:
    """Return whether a text is an image's name, or its id on a node, and nothing else."""
    if _ID.fullmatch(reference):
        return True
    name, at, digest = reference.partition("@")
    first, slash, rest = name.partition("/")
    repository, tag = split_tag(rest if slash and _is_registry(first) else name)
    return (
        (not at or _DIGEST.fullmatch(digest) is not None)
        and _PATH.fullmatch(repository) is not None
        and _TAG.fullmatch(tag) is not None
    )


def is_id(reference: str) -> bool:
    """Return whether a reference is the id of an image on a node, which names no registry."""
    return _ID.fullmatch(reference) is not None


def may_be_id(reference: str) -> bool:
    """Return whether a daemon can take a reference for an id, or for the beginning of one."""
    return is_id(reference) or _SHORT_ID.fullmatch(reference) is not None


def has_tag(reference: str) -> bool:
    """Return whether a reference has a tag or a digest."""
    return "@" in reference or ":" in reference.rpartition("/")[2]


def registry_of(reference: str) -> str:
    """Return the registry of a reference, ``HOST[:PORT]``."""
    first, slash, _ = reference.partition("/")
    if not (slash and _is_registry(first)):
        return HUB
    return HUB if first == f"index.{HUB}" else first


def _is_registry(first: str) -> bool:
    """Return whether the first part of a name is a registry; otherwise it is a namespace."""
    looks_like_one = "." in first or ":" in first or first == "localhost"
    return looks_like_one and _HOST.fullmatch(first) is not None
