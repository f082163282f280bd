"""Pure decisions about published environments: order of versions, content, statuses, search.

Redis sorts by bytes, so a version is turned into text that sorts like the version.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

from aenv_ray.errors import ArtifactQuotaExceeded, CatalogConflict, EnvironmentNotFound, Forbidden
from aenv_ray.hub.records import (
    ArtifactsHeld,
    EnvironmentStatus,
    EnvironmentVersion,
    NameRecord,
    Right,
)
from aenv_ray.project import project

MAX_SEARCH_WORDS: Final = 8
"""Number of words of a search text that count; the others are ignored."""
MAX_ENTRY_WORDS: Final = 512
"""Number of words of an entry's name, tags and description, in this order, that are indexed."""
MAX_ARTIFACTS: Final = 10_000
"""Number of artifacts of one owner."""
_MAX_WORD: Final = 64

_SEMANTIC = re.compile(
    r"[vV]?(?P<core>\d+(?:\.\d+)*)(?:-(?P<pre>[0-9A-Za-z.-]+?))?(?:\+.+)?",
    re.ASCII,
)
_WORD = re.compile(r"[^\W_]+")

# --- order of versions ---------------------------------------------------------------------------


def version_key(version: str) -> str:
    """Return text that sorts like semantic versions (semver.org §11), for any valid version.

    ``1.0``, ``v1.0.0`` and ``1.0.0+build`` are the same release and sort by their text, so that
    different versions have different keys. Other versions, such as ``latest``, sort below all
    semantic ones.
    """
    match = _SEMANTIC.fullmatch(version)
    pre = match["pre"] if match else None
    if match is None or (pre is not None and "" in pre.split(".")):
        return f"0{version} "
    numbers = [part.lstrip("0") for part in match["core"].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    core = "".join("1" + _number_key(number) for number in numbers) + "0"
    return f"1{core}{_prerelease_key(pre)}{version} "


def _number_key(digits: str) -> str:
    """Return digits, without leading zeros, so that longer numbers sort higher."""
    return f"{len(digits):02d}{digits}"


def _prerelease_key(pre: str | None) -> str:
    if pre is None:
        return "2"  # a release sorts above its prereleases
    parts = []
    for part in pre.split("."):
        is_number = part.isdigit()
        parts.append("1" + _number_key(part.lstrip("0")) if is_number else f"2{part}!")
    return "1" + "".join(parts) + "0"


def member(name: str, version: str) -> str:
    """Return a version as a member of sorted sets: sorted by name, then highest version first."""
    falling = "".join(chr(0x9E - ord(char)) for char in version_key(version))
    return f"{name} {falling} {version}"


def member_reference(member_text: str) -> str:
    """Return the ``name@version`` of a member."""
    name, _, version = member_text.split(" ")
    return f"{name}@{version}"


# --- content -------------------------------------------------------------------------------------


def version_digest(entry: EnvironmentVersion) -> str:
    """Return the SHA-256 of the immutable part of a version.

    It excludes the schemas, which follow from the source and depend on the versions of libraries,
    and the digest of the archive, which depends on how it was packed.
    """
    content = entry.model_dump(
        mode="json", include={"digest", "config", "artifacts", "description", "tags"}
    )
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- names ---------------------------------------------------------------------------------------


def check_may_publish(name: NameRecord, owner: str | None, *, is_admin: bool) -> None:
    """Raise an error unless an owner may publish under a name.

    Raises:
        Forbidden: The name belongs to another owner, who has not granted it; or it is that of a
            built-in environment, for which settings of the operator may be meant, and there is no
            grant. Its owner needs one, too, who may have had the name before there was a built-in.
    """
    if is_admin:
        return
    is_builtin = name.name in project.builtins()
    if (name.grants_to if is_builtin else name.may)(owner or "", Right.PUBLISH):
        return
    if is_builtin:
        raise _only_administrators(name.name, "publish it")
    raise Forbidden(
        f"the name {name.name!r} belongs to another owner",
        hint=f"choose another name, or have its owner run: aenv grant {name.name} {owner} publish",
    )


def check_may_grant(name: str, right: Right | None, *, is_admin: bool) -> None:
    """Raise an error unless the owner of a name may grant a right, or revoke any (None).

    Raises:
        Forbidden: It lets others publish under the name of a built-in environment.
    """
    if right is Right.PUBLISH and not is_admin and name in project.builtins():
        raise _only_administrators(name, "grant it")


def _only_administrators(name: str, way_out: str) -> Forbidden:
    return Forbidden(
        f"the name {name!r} is that of a built-in environment",
        hint=f"choose another name, or have an administrator {way_out}",
    )


def unpublished(name: str) -> EnvironmentNotFound:
    """Return the error for a name that is not published, or that the caller may not use."""
    return EnvironmentNotFound(
        f"no environment {name!r} is published",
        hint="aenv list shows what you may use; aenv push publishes a project",
    )


def is_full(held: ArtifactsHeld, size_bytes: int, quota_bytes: int | None) -> bool:
    """Whether an owner has no room for another artifact."""
    is_large = quota_bytes is not None and held.size_bytes + size_bytes > quota_bytes
    return is_large or held.number >= MAX_ARTIFACTS


def being_deleted(digest: str) -> CatalogConflict:
    """Return the error for an artifact that is used again while it is deleted."""
    return CatalogConflict(
        f"artifact {digest[:12]}, which no version referred to, is being deleted",
        hint="send it again in a few seconds",
    )


def artifacts_full(
    owner: str, held: ArtifactsHeld, size_bytes: int, quota_bytes: int | None
) -> ArtifactQuotaExceeded:
    """Return the error for an upload that exceeds an owner's quota."""
    if held.number >= MAX_ARTIFACTS:
        return ArtifactQuotaExceeded(
            f"{owner} has {held.number:,} artifacts, and an owner may have {MAX_ARTIFACTS:,}",
            hint="delete unused versions, whose archives go within two hours",
        )
    return ArtifactQuotaExceeded(
        f"{owner} has {held.size_bytes >> 20} MiB of artifacts and may have "
        f"{(quota_bytes or 0) >> 20} MiB: "
        f"there is no room for {max(1, size_bytes >> 20)} MiB more",
        hint="delete unused versions, whose archives go within two hours, or have the operator "
        "raise AENV_ARTIFACT_QUOTA",
    )


# --- statuses ------------------------------------------------------------------------------------

_PROGRESS: Final = (
    EnvironmentStatus.INIT,
    EnvironmentStatus.PENDING,
    EnvironmentStatus.CREATING,
    EnvironmentStatus.CREATED,
    EnvironmentStatus.TESTING,
    EnvironmentStatus.VERIFIED,
    EnvironmentStatus.READY,
)
_RELEASABLE: Final = frozenset({EnvironmentStatus.VERIFIED, EnvironmentStatus.READY})


def may_become(old: EnvironmentStatus, new: EnvironmentStatus) -> bool:
    """Return whether a version may change from one status to another.

    Forward, steps may be skipped; backward, only to Pending or Testing. Released is final and
    follows Verified or Ready. Any other status may change to Failed, and Failed to any other.
    """
    if old is new:
        return True
    if old is EnvironmentStatus.RELEASED:
        return False
    if new is EnvironmentStatus.RELEASED:
        return old in _RELEASABLE
    if EnvironmentStatus.FAILED in (old, new):
        return True
    again = (EnvironmentStatus.PENDING, EnvironmentStatus.TESTING)
    return _PROGRESS.index(new) > _PROGRESS.index(old) or new in again


def check_transition(reference: str, old: EnvironmentStatus, new: EnvironmentStatus) -> None:
    """Raise an error unless `may_become` allows the transition.

    Raises:
        CatalogConflict: It does not; the hint names the allowed statuses.
    """
    if may_become(old, new):
        return
    ways = ", ".join(s for s in EnvironmentStatus if s is not old and may_become(old, s))
    raise CatalogConflict(
        f"{reference} cannot change from status {old} to {new}",
        hint=f"{old} may change to: {ways}" if ways else "publish a new version",
    )


# --- search --------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Return the distinct lower-case words of a text, in order."""
    found = (word[:_MAX_WORD] for word in _WORD.findall(text.casefold()))
    return list(dict.fromkeys(found))


def search_words(entry: EnvironmentVersion) -> list[str]:
    """Return the words by which a search finds an entry."""
    text = " ".join((entry.name, *entry.tags, entry.description))
    return words_of(text)[:MAX_ENTRY_WORDS]
