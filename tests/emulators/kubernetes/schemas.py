"""The API server's strict schemas, read once: their definitions are megabytes of JSON."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any, Final

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

VERSION: Final = "1.34"
"""Of Kubernetes."""
_DIRECTORY: Final = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
_DOMAIN: Final = re.compile(r"^([^./]*)(?:\.[^/]*)?/")


def fault_of(body: dict[str, Any]) -> ValidationError | None:
    """Return what is wrong with an object; None when nothing is.

    Raises:
        LookupError: Its kind has no schema here.
    """
    validator = _validator(str(body.get("kind", "")), str(body.get("apiVersion", "")))
    return best_match(validator.iter_errors(body))


@cache
def _validator(kind: str, api_version: str) -> Draft202012Validator:
    # Files are named as kubernetes-validate names them: rbac.authorization.k8s.io/v1 is rbac-v1.
    group = _DOMAIN.sub(r"\1-", api_version)
    schema = _read(f"{kind.lower()}-{group}.json")
    registry = Resource.from_contents(schema) @ _definitions()
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions() -> Registry[Any]:
    definitions: Registry[Any] = Registry()
    return Resource.from_contents(_read("_definitions.json")) @ definitions


def _read(name: str) -> Any:
    file = resources.files("kubernetes_validate").joinpath(_DIRECTORY, name)
    if not file.is_file():
        raise LookupError(f"Kubernetes {VERSION} has no schema {name}")
    return json.loads(file.read_bytes())
