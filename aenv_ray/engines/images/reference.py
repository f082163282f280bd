"""Names of images: what they may be, and what their parts are.

The grammar is that of https://github.com/distribution/reference.
"""

from __future__ import annotations

import re
from typing import Final

from aenv_ray.errors import ConfigError

HUB: Final = "docker.io"
"""The registry of a name that names none."""
_LENGTH: Final = 255
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST: Final = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::\d+)?")
_WORD: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH: Final = re.compile(rf"{_WORD}(?:/{_WORD})*")
_TAG: Final = re.compile(r"\w[\w.-]{0,127}", re.ASCII)


def compose(registry: str, namespace: str, name: str, tag: str) -> str:
    """Return ``registry/namespace/name:tag``.

    Args:
        registry: ``HOST[:PORT]``; "" for `HUB`.
        namespace: Whose images they are there; "" for none.
        name: May have slashes.
        tag: Which of the images of that name.

    Raises:
        ConfigError: A part is not what it may be: which, and what it may be.
    """
    if registry and not _is_registry(registry):
        raise ConfigError(
            f"{registry!r} is not the name of a registry",
            hint="a registry is HOST.DOMAIN or HOST:PORT, without https:// and without a path",
        )
    for what, part in (("namespace", namespace), ("name", name)):
        if (part or what == "name") and not _PATH.fullmatch(part):
            raise ConfigError(
                f"{part!r} cannot be the {what} of an image",
                hint="lower-case letters and digits, with . _ - or / between them",
            )
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f"{tag!r} cannot be the tag of an image",
            hint="letters, digits, _ . and -, at most 128; give one with -t",
        )
    repository = "/".join(part for part in (registry, namespace, name) if part)
    if len(repository) > _LENGTH:
        raise ConfigError(f"an image's name has at most {_LENGTH} characters: {repository!r}")
    return f"{repository}:{tag}"


def split_tag(reference: str) -> tuple[str, str]:
    """Return repository and tag; ``latest`` where there is none."""
    head, slash, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", tag or "latest"


def has_tag(reference: str) -> bool:
    """Whether a reference says which image of a repository it means: by a tag or a digest."""
    return "@" in reference or ":" in reference.rpartition("/")[2]


def registry_of(reference: str) -> str:
    """Return the registry, ``HOST[:PORT]``, that an image comes from."""
    first, slash, _ = reference.partition("/")
    if not (slash and _is_registry(first)):
        return HUB
    return HUB if first == f"index.{HUB}" else first


def _is_registry(first: str) -> bool:
    """Whether the first part of a name is a registry; daemons take any other for a namespace."""
    told_apart = "." in first or ":" in first or first == "localhost"
    return told_apart and _HOST.fullmatch(first) is not None
