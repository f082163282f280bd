"""What the emulated API keeps: objects by kind, versions of all changes, and who watches.

Used on one event loop. Kinds are not known here beyond the rules that hold for all of them.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]


def timestamp(in_s: float = 0.0) -> str:
    """Return a time, `in_s` seconds from now, as the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Kind:
    """Where objects of one kind are: group and plural, and the namespace; "" for none."""

    group: str
    resource: str
    namespace: str


class Refused(Exception):
    """What the API answers instead, as a ``Status``."""

    def __init__(self, code: int, reason: str, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after = retry_after

    def status(self) -> Object:
        """Return the answer."""
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": str(self), "reason": self.reason, "code": self.code,
        }  # fmt: skip


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a label selector, as a query has it, matches.

    Raises:
        Refused: It is none of the forms that are known here.
    """
    for term in filter(None, selector.split(",")):
        if "(" in term or " " in term:
            raise Refused(400, "BadRequest", f"unable to parse requirement: {term}")
        if "!=" in term:
            key, _, value = term.partition("!=")
            holds = labels.get(key) != value
        elif "=" in term:
            key, _, value = term.partition("=")
            holds = labels.get(key) == value.removeprefix("=")
        else:
            holds = (term.removeprefix("!") in labels) != term.startswith("!")
        if not holds:
            return False
    return True


def merged(target: Any, patch: Any) -> Any:
    """Return what a JSON merge patch makes of a value (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def parse_path(path: str) -> tuple[Kind, str, str]:
    """Return the kind that a request is about, the object's name and what of it; "" for none.

    Raises:
        Refused: It is no path of the API.
    """
    words = path.strip("/").split("/")
    if words[0] == "api":
        group, words = "", words[2:]
    elif words[0] == "apis" and len(words) > 3:
        group, words = words[1], words[3:]
    else:
        raise Refused(404, "NotFound", f"the server could not find {path}")
    namespace = ""
    if words[0] == "namespaces" and len(words) > 2:
        namespace, words = words[1], words[2:]
    resource, name, subresource = (*words, "", "")[:3]
    return Kind(group, resource, namespace), name, subresource


class Store:
    """All objects of a cluster."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[str, Object]] = {}
        self._versions = itertools.count(1)
        self._version = 0
        self._forgotten = 0
        self._events: list[tuple[int, Kind, str, Object]] = []
        self._changed: set[asyncio.Event] = set()

    @property
    def version(self) -> str:
        """Of the latest change."""
        return str(self._version)

    def all(self, kind: Kind) -> list[Object]:
        """Return the objects of a kind; with namespace "", those of every namespace."""
        found: list[Object] = []
        for known, objects in self._objects.items():
            if (known.group, known.resource) == (kind.group, kind.resource) and (
                not kind.namespace or known.namespace == kind.namespace
            ):
                found += objects.values()
        return found

    def get(self, kind: Kind, name: str) -> Object:
        """Return an object.

        Raises:
            Refused: There is none.
        """
        found = self.find_name(kind, name)
        if found is None:
            raise Refused(404, "NotFound", f'{kind.resource} "{name}" not found')
        return found

    def find_name(self, kind: Kind, name: str) -> Object | None:
        """Return an object, or None if there is none."""
        return self._objects.get(kind, {}).get(name)

    def add(self, kind: Kind, body: Object) -> Object:
        """Add an object.

        Raises:
            Refused: There is one of its name.
        """
        body = copy.deepcopy(body)
        metadata = body["metadata"]
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if metadata["name"] in self._objects.get(kind, {}):
            name = metadata["name"]
            raise Refused(409, "AlreadyExists", f'{kind.resource} "{name}" already exists')
        if kind.namespace:
            metadata["namespace"] = kind.namespace
        metadata["uid"] = str(uuid.uuid4())
        metadata["generation"] = 1
        metadata["creationTimestamp"] = timestamp()
        self._objects.setdefault(kind, {})[metadata["name"]] = body
        return self._note("ADDED", kind, body)

    def change(self, kind: Kind, name: str, body: Object) -> Object:
        """Put another content in place of an object's."""
        body = copy.deepcopy(body)
        self._objects[kind][name] = body
        return self._note("MODIFIED", kind, body)

    def remove(self, kind: Kind, name: str) -> None:
        """Remove an object; does nothing when there is none."""
        body = self._objects.get(kind, {}).pop(name, None)
        if body is not None:
            self._note("DELETED", kind, body)

    def find(self, uid: str) -> tuple[Kind, Object] | None:
        """Return the object of a uid."""
        for kind, objects in self._objects.items():
            for body in objects.values():
                if body["metadata"]["uid"] == uid:
                    return kind, body
        return None

    def owned_by(self, uid: str) -> list[tuple[Kind, Object]]:
        """Return the objects that name an owner."""
        return [
            (kind, body)
            for kind, objects in self._objects.items()
            for body in objects.values()
            if any(r["uid"] == uid for r in body["metadata"].get("ownerReferences", ()))
        ]

    def _note(self, what: str, kind: Kind, body: Object) -> Object:
        self._version = next(self._versions)
        body["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, what, copy.deepcopy(body)))
        for event in self._changed:
            event.set()
        return body

    # --- watches ----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all earlier changes: a watch that begins before now is too old."""
        self._events.clear()
        self._forgotten = self._version

    def since(self, kind: Kind, version: int) -> list[tuple[int, str, Object]]:
        """Return the changes of a kind after a version.

        Raises:
            Refused: They are forgotten.
        """
        if version < self._forgotten:
            message = f"too old resource version: {version} ({self._forgotten})"
            raise Refused(410, "Expired", message)
        wanted = (kind.group, kind.resource)
        return [
            (number, what, body)
            for number, known, what, body in self._events
            if number > version
            and (known.group, known.resource) == wanted
            and (not kind.namespace or known.namespace == kind.namespace)
        ]

    def listen(self) -> asyncio.Event:
        """Return what is set at every change, until `unlisten`."""
        event = asyncio.Event()
        self._changed.add(event)
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        """Set it no more."""
        self._changed.discard(event)
