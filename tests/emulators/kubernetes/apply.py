"""Server-side apply of the emulated API: each field on the first level of a spec has owners.

A real API server knows the owners of every field, however deep, except in lists that are one field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.emulators.kubernetes.store import Object, Refused


def applied(before: Object, body: Object, manager: str, force: bool) -> Object:
    """Return what an apply makes of an object, which is empty if it does not exist yet.

    Raises:
        Refused: Another manager owns a field with another value, and `force` is not set.
    """
    old, new = before.get("spec") or {}, body.get("spec") or {}
    owners = _owners(before)
    mine = owners.pop(manager, set())
    for other, fields in owners.items():
        taken = {field for field in fields & new.keys() if old.get(field) != new[field]}
        if taken and not force:
            message = f'Apply failed with 1 conflict: conflict with "{other}": .spec.{min(taken)}'
            raise Refused(409, "Conflict", message)
        fields.difference_update(taken)
    dropped = mine.difference(new, *owners.values())
    spec = {field: value for field, value in old.items() if field not in dropped} | new
    metadata = {**before.get("metadata", {}), **body["metadata"]}
    after = {**before, **body, "metadata": metadata} | ({"spec": spec} if spec else {})
    return _with_owners(after, {**owners, manager: set(new)})


def owned(body: Object, manager: str, field: str) -> Object:
    """Return an object whose field of the spec has one more owner."""
    owners = _owners(body)
    return _with_owners(body, {**owners, manager: owners.get(manager, set()) | {field}})


def _owners(body: Object) -> dict[str, set[str]]:
    """Return the fields of the spec that each manager owns."""
    return {
        entry["manager"]: {name.removeprefix("f:") for name in entry["fieldsV1"]["f:spec"]}
        for entry in body.get("metadata", {}).get("managedFields", ())
    }


def _with_owners(body: Object, owners: Mapping[str, set[str]]) -> Object:
    entries: list[dict[str, Any]] = [
        {
            "manager": manager, "operation": "Apply", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": {f"f:{field}": {} for field in sorted(fields)}},
        }
        for manager, fields in sorted(owners.items())
    ]  # fmt: skip
    return {**body, "metadata": {**body["metadata"], "managedFields": entries}}
