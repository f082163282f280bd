"""What the catalog of environments decides: the order of versions, content, statuses, search.

Pure: no Redis, no clock. Redis sorts by bytes, so the order of versions is written as text that
sorts as the versions do.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

from aenv_ray.errors import CatalogConflict
from aenv_ray.hub.records import EnvironmentStatus, EnvironmentVersion

MAX_SEARCH_WORDS: Final = 8
"""Words of a search text that are looked at; what follows is not."""
MAX_ENTRY_WORDS: Final = 512
"""Words of an entry's name, tags and description, in this order, that a search finds."""
_MAX_WORD: Final = 64

_SEMANTIC = re.compile(
    r"[vV]?(?P<core>\d+(?:\.\d+)*)(?:-(?P<pre>[0-9A-Za-z.-]+?))?(?:\+.+)?",
    re.ASCII,
)
_WORD = re.compile(r"[^\W_]+")

# --- order of versions ---------------------------------------------------------------------------


def version_key(version: str) -> str:
    """Return text that sorts as semantic versions do (semver.org §11), for any valid version.

    ``1.0``, ``v1.0.0`` and ``1.0.0+build`` are the same release; text breaks such ties, so that two
    different versions never have one key. What is no semantic version, such as ``latest``, comes
    below all that are.
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
    """Return digits without leading zeros so that longer numbers sort higher."""
    return f"{len(digits):02d}{digits}"


def _prerelease_key(pre: str | None) -> str:
    if pre is None:
        return "2"  # a release comes after all that lead to it
    parts = []
    for part in pre.split("."):
        is_number = part.isdigit()
        parts.append("1" + _number_key(part.lstrip("0")) if is_number else f"2{part}!")
    return "1" + "".join(parts) + "0"


def member(name: str, version: str) -> str:
    """Return a version's member of the sorted sets: by name, then the highest version first."""
    falling = "".join(chr(0x9E - ord(char)) for char in version_key(version))
    return f"{name} {falling} {version}"


def reference_of(member_text: str) -> str:
    """Return the ``name@version`` of a member."""
    name, _, version = member_text.split(" ")
    return f"{name}@{version}"


# --- content -------------------------------------------------------------------------------------


def content_digest(entry: EnvironmentVersion) -> str:
    """Return the SHA-256 of what never changes in a version.

    Schemas are left out: they follow from the source, and another release of a library may word
    them differently. So is the archive's own digest, which depends on how it was packed.
    """
    content = entry.model_dump(
        mode="json", include={"digest", "config", "artifacts", "description", "tags"}
    )
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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
    """Whether a version of one status may get the other.

    Forward, steps may be left out; back, only to be built or tested again; Released is for good,
    and comes after Verified or Ready; anything else may fail, and what failed may be mended.
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
    """Do nothing where `may_become` allows the way.

    Raises:
        CatalogConflict: It does not; the hint names the ways that it allows.
    """
    if may_become(old, new):
        return
    ways = ", ".join(s for s in EnvironmentStatus if s is not old and may_become(old, s))
    raise CatalogConflict(
        f"{reference} is {old} and cannot become {new}",
        hint=f"from {old} it may become: {ways}" if ways else "publish a new version",
    )


# --- search --------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Return the lower-case words of a text, each once, in their order."""
    found = (word[:_MAX_WORD] for word in _WORD.findall(text.casefold()))
    return list(dict.fromkeys(found))


def search_words(entry: EnvironmentVersion) -> list[str]:
    """Return the words by which a search finds an entry."""
    text = " ".join((entry.name, *entry.tags, entry.description))
    return words_of(text)[:MAX_ENTRY_WORDS]


def is_found(entry: EnvironmentVersion, text: str) -> bool:
    """Whether a search for `text` finds an entry: each word begins one of the entry's words.

    This says what `HubCore` does with sorted sets.
    """
    known = search_words(entry)
    wanted = words_of(text)[:MAX_SEARCH_WORDS]
    return all(any(word.startswith(want) for word in known) for want in wanted)
