"""The strict schemas of the API server and of KubeRay's kinds.

They are read once: their definitions are megabytes of JSON.
"""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match
from referencing import Registry, Resource

VERSION: Final = "1.34"
"""Of Kubernetes."""
_DIRECTORY: Final = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
_CRDS: Final = Path(__file__).parents[2] / "fixtures" / "kuberay" / "crds-1.7.0.json.gz"
_DOMAIN: Final = re.compile(r"^([^./]*)(?:\.[^/]*)?/")


def fault_of(body: dict[str, Any]) -> ValidationError | None:
    """Return what is wrong with an object; None when nothing is.

    Raises:
        LookupError: Its kind has no schema here.
    """
    return best_match(faults_of(body))


def faults_of(body: dict[str, Any]) -> list[ValidationError]:
    """Return all that is wrong with an object.

    Raises:
        LookupError: Its kind has no schema here.
    """
    kind, version = str(body.get("kind", "")), str(body.get("apiVersion", ""))
    if version.startswith("ray.io/"):
        plain = {key: value for key, value in body.items() if key != "metadata"}
        return list(_ray_validator(kind).iter_errors(plain))
    return list(_validator(kind, version).iter_errors(body))


@cache
def _validator(kind: str, api_version: str) -> Draft202012Validator:
    # Files are named as kubernetes-validate names them: rbac.authorization.k8s.io/v1 is rbac-v1.
    group = _DOMAIN.sub(r"\1-", api_version)
    schema = _read(f"{kind.lower()}-{group}.json")
    registry = Resource.from_contents(schema) @ _definitions()
    return Draft202012Validator(schema, registry=registry)


@cache
def _ray_validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(_closed(json.loads(gzip.decompress(_CRDS.read_bytes()))[kind]))


def _closed(schema: Any) -> Any:
    """Return a schema that refuses what the API would drop, and that knows its two extensions."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    result = {
        key: {name: _closed(part) for name, part in value.items()}
        if key == "properties"
        else _closed(value)
        for key, value in schema.items()
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        result["additionalProperties"] = False
    return result


@cache
def _definitions() -> Registry[Any]:
    definitions: Registry[Any] = Registry()
    return Resource.from_contents(_read("_definitions.json")) @ definitions


def _read(name: str) -> Any:
    file = resources.files("kubernetes_validate").joinpath(_DIRECTORY, name)
    if not file.is_file():
        raise LookupError(f"Kubernetes {VERSION} has no schema {name}")
    return json.loads(file.read_bytes())
