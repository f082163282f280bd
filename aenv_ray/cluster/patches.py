"""Patches of objects: strategic merge, and JSON Patch (RFC 6902), as kustomize applies them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aenv_ray.errors import ConfigError

_MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
"""Lists of Kubernetes' own objects that are merged by a key; other lists are replaced."""
_BUILT_IN: Final = frozenset({"v1", "apps/v1", "batch/v1"})
_DIRECTIVE: Final = "$patch"


def merge(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with a strategic merge patch applied.

    Maps are merged, null removes, lists are replaced, but for those of Kubernetes' own objects that
    have a key. ``$patch: delete`` removes an element of such a list, ``$patch: replace`` a map.

    Raises:
        ConfigError: It has a directive that is not known here.
    """
    return _merge(document, patch, keyed=str(document.get("apiVersion")) in _BUILT_IN)


def _merge(document: Mapping[str, Any], patch: Mapping[str, Any], *, keyed: bool) -> dict[str, Any]:
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {key: copy.deepcopy(v) for key, v in patch.items() if key != _DIRECTIVE}
    if directive is not None:
        raise ConfigError(f"a patch says {_DIRECTIVE}: {directive!r} where that means nothing")
    result = dict(document)
    for key, value in patch.items():
        here = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = _merge(here if isinstance(here, Mapping) else {}, value, keyed=keyed)
        elif isinstance(value, list) and isinstance(here, list) and keyed and key in _MERGE_KEYS:
            result[key] = _merge_list(here, value, _MERGE_KEYS[key])
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merge_list(here: Sequence[Any], patch: Sequence[Any], name: str) -> list[Any]:
    """Return a list with elements merged by a key: the patch's in its order, then the others."""
    others = {element[name]: element for element in here}
    result = []
    for element in patch:
        old = others.pop(element[name], {})
        if element.get(_DIRECTIVE) != "delete":
            result.append(_merge(old, element, keyed=True))
    return [*result, *others.values()]


def json_patch(
    document: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an object with operations ``add``, ``replace``, ``remove`` and ``test`` applied.

    Raises:
        ConfigError: One is malformed, or does not fit the object.
    """
    result = copy.deepcopy(dict(document))
    for operation in operations:
        _apply(result, operation)
    return result


def _apply(document: Any, operation: Mapping[str, Any]) -> None:
    name, path = operation.get("op"), str(operation.get("path", ""))
    keys = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    node = document
    for key in keys[:-1]:
        node = _below(node, key, path)
    last: Any = keys[-1] if keys else ""
    value = copy.deepcopy(operation.get("value"))
    if isinstance(node, list):
        if name == "add" and last == "-":
            node.append(value)
            return
        if not last.isdigit() or int(last) >= len(node) + (name == "add"):
            raise ConfigError(f"a patch changes {path}, and the list is shorter")
        last = int(last)
        if name == "add":
            node.insert(last, value)
            return
    elif not isinstance(node, dict) or (name != "add" and last not in node):
        raise ConfigError(f"a patch changes {path}, and that is not there")
    if name in {"add", "replace"}:
        node[last] = value
    elif name == "remove":
        del node[last]
    elif name != "test":
        raise ConfigError(f"a patch has the operation {name!r}, which is not known here")
    elif node[last] != value:
        raise ConfigError(f"a patch wants {value!r} at {path}, and {node[last]!r} is there")


def _below(node: Any, key: str, path: str) -> Any:
    if isinstance(node, list) and key.isdigit() and int(key) < len(node):
        return node[int(key)]
    if isinstance(node, dict) and key in node:
        return node[key]
    raise ConfigError(f"a patch changes {path}, and {key!r} is not there")
