"""Renders a directory with a ``kustomization.yaml`` as ``kubectl kustomize`` does, without kubectl.

It supports what our manifests use: resources, components, patches, labels and replacements.
Anything else in a kustomization is refused, never ignored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.cluster import yaml_files
from aenv_ray.cluster.objects import Document
from aenv_ray.errors import ConfigError

FILE: Final = "kustomization.yaml"
LOCAL: Final = "config.kubernetes.io/local-config"
"""Annotation of objects that are used for rendering only."""
_SUPPORTED: Final = frozenset(
    {"apiVersion", "kind", "resources", "components", "patches", "labels", "replacements"}
)
_MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
"""Lists of built-in objects that are merged by a key; other lists are replaced."""
_BUILT_IN: Final = frozenset({"v1", "apps/v1", "batch/v1"})
_DIRECTIVE: Final = "$patch"


def render(directory: Path, change: Callable[[Document], Document] | None = None) -> list[Document]:
    """Return the objects of a kustomization, in its order.

    Args:
        directory: Holds the ``kustomization.yaml``.
        change: Applied to each object when it is read. None: no change.

    Raises:
        ConfigError: A file is missing or malformed, or uses an unsupported feature.
    """
    found = _Kustomization(directory, change or (lambda document: document)).objects([])
    return [document for document in found if not _is_local(document)]


def _is_local(document: Document) -> bool:
    annotations = document.get("metadata", {}).get("annotations") or {}
    return str(annotations.get(LOCAL, "")).lower() == "true"


class _Kustomization:
    def __init__(self, directory: Path, change: Callable[[Document], Document]) -> None:
        self._directory = directory
        self._change = change
        path = directory / FILE
        documents = yaml_files.read(path)
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise ConfigError(
                f"{path} is not a kustomization: expected one YAML mapping",
                hint="write one mapping of resources, components, patches, labels and replacements",
            )
        self._content = documents[0]
        unknown = sorted(set(self._content) - _SUPPORTED)
        if unknown:
            raise ConfigError(
                f"{path} uses {', '.join(unknown)}, which `aenv cluster` does not support",
                hint=self._by_kubectl(),
            )

    def _by_kubectl(self) -> str:
        return f"kubectl kustomize {self._directory} > all.yaml; then: aenv cluster apply all.yaml"

    def objects(self, above: list[Document]) -> list[Document]:
        """Return its objects; a component changes the objects `above` it, too.

        Raises:
            ConfigError: Names this file, and the way out if kubectl supports what it uses.
        """
        try:
            return self._objects(above)
        except ConfigError as exc:
            if exc.hint:
                raise
            raise ConfigError(
                f"{self._directory / FILE}: {exc.message}",
                hint=f"correct it; or, if kubectl accepts it: {self._by_kubectl()}",
            ) from None

    def _objects(self, above: list[Document]) -> list[Document]:
        found = list(above)
        for entry in self._content.get("resources") or []:
            found += self._resource(entry)
        for entry in self._content.get("components") or []:
            found = _Kustomization(self._directory / entry, self._change).objects(found)
        for entry in self._content.get("patches") or []:
            self._patch(found, entry)
        for entry in self._content.get("labels") or []:
            _add_labels(found, entry)
        for entry in self._content.get("replacements") or []:
            _replace(found, entry)
        return found

    def _resource(self, entry: str) -> list[Document]:
        path = self._directory / entry
        if path.is_dir():
            return _Kustomization(path, self._change).objects([])
        documents = yaml_files.read(path)
        for document in documents:
            if not isinstance(document, dict) or not document.get("kind"):
                raise ConfigError(f"{path} contains a document that is not a Kubernetes object")
        return [self._change(document) for document in documents]

    def _patch(self, found: list[Document], entry: Mapping[str, Any]) -> None:
        where = f"a patch of {self._directory / FILE}"
        if entry.get("path"):
            documents = yaml_files.read(self._directory / str(entry["path"]))
        else:
            documents = yaml_files.parse(str(entry.get("patch")), where)
        for patch in documents:
            target = entry.get("target")
            if target is None:
                if not isinstance(patch, dict) or "kind" not in patch:
                    raise ConfigError(f"{where} has no target")
                target = {"kind": patch["kind"], "name": re.escape(patch["metadata"]["name"])}
            indices = [n for n, document in enumerate(found) if _is_target(document, target)]
            if not indices and "target" not in entry:
                raise ConfigError(f"{where} is for {target}, which does not exist")
            for index in indices:
                changed = json_patch if isinstance(patch, list) else merge_patch
                found[index] = changed(found[index], patch)


def _facts(document: Document) -> dict[str, str]:
    """Return what targets and selectors compare."""
    group, _, version = str(document.get("apiVersion")).rpartition("/")
    facts = {"group": group, "version": version, "kind": document["kind"]}
    return facts | {key: document["metadata"].get(key, "") for key in ("name", "namespace")}


def _is_target(document: Document, target: Mapping[str, Any]) -> bool:
    """Return whether a patch's target, which consists of regular expressions, matches."""
    facts = _facts(document)
    unknown = sorted(set(target) - set(facts))
    if unknown:
        raise ConfigError(f"unsupported in the target of a patch: {', '.join(unknown)}")
    return all(re.fullmatch(str(wanted), facts[key]) for key, wanted in target.items())


def _is_selected(document: Document, select: Mapping[str, Any]) -> bool:
    facts = _facts(document)
    return all(facts.get(key) == wanted for key, wanted in select.items())


def _add_labels(found: list[Document], entry: Mapping[str, Any]) -> None:
    if entry.get("includeSelectors") or entry.get("includeTemplates") or entry.get("fields"):
        raise ConfigError("unsupported in labels: includeSelectors, includeTemplates and fields")
    for document in found:
        document["metadata"].setdefault("labels", {}).update(entry["pairs"])


def _replace(found: list[Document], entry: Mapping[str, Any]) -> None:
    source = dict(entry["source"])
    path = source.pop("fieldPath", "metadata.name")
    sources = [document for document in found if _is_selected(document, source)]
    if len(sources) != 1:
        raise ConfigError(f"{len(sources)} objects match the source {source}; expected one")
    value = get_field(sources[0], path)
    if value in (None, {}, []):
        raise ConfigError(f"{source['kind']} {source.get('name', '')} has no value at {path}")
    for target in entry["targets"]:
        options = target.get("options") or {}
        if set(options) - {"create"} or target.get("reject"):
            raise ConfigError("unsupported in replacements: delimiter, index and reject")
        for document in found:
            if not _is_selected(document, target["select"]):
                continue
            for field in target["fieldPaths"]:
                if not set_field(document, field, value, create=bool(options.get("create"))):
                    name = document["metadata"].get("name")
                    raise ConfigError(f"{document['kind']} {name} has no field {field}")


# --- fields ---------------------------------------------------------------------------------------
#
# As in ``spec.containers.[name=ray].image``: keys and indices between dots, ``[key=value]`` for the
# elements of a list with that value, ``*`` for all elements, ``[a.b/c]`` for a key with dots.


def get_field(document: Any, path: str) -> Any:
    """Return the value at a path, or None if there is none.

    Raises:
        ConfigError: The path matches several fields.
    """
    found = list(_fields(document, _split(path), create=False))
    if len(found) > 1:
        raise ConfigError(f"{path} matches {len(found)} fields; expected one")
    return found[0][0][found[0][1]] if found else None


def set_field(document: Any, path: str, value: Any, *, create: bool = False) -> int:
    """Set every field that a path matches.

    A scalar that replaces another scalar is converted to its type; maps and lists are replaced.

    Args:
        document: Changed in place.
        path: May match several fields.
        value: Copied.
        create: Create missing keys.

    Returns:
        How many fields were set.

    Raises:
        ConfigError: The value cannot be converted.
    """
    count = 0
    for container, key in _fields(document, _split(path), create=create):
        container[key] = _converted(value, container[key], path)
        count += 1
    return count


def _split(path: str) -> list[str]:
    """Split at dots, except in brackets or after a backslash."""
    parts, part, depth, escaped = [], "", 0, False
    for character in path:
        if escaped or (character not in ".\\" or depth):
            part += character
            escaped = False
            depth += {"[": 1, "]": -1}.get(character, 0)
        elif character == "\\":
            escaped = True
        else:
            parts.append(part)
            part = ""
    return [part for part in (*parts, part) if part]


def _fields(node: Any, parts: list[str], *, create: bool) -> Iterator[tuple[Any, Any]]:
    """Yield container and key of each field."""
    part, rest = parts[0], parts[1:]
    for key in _keys(node, part, create=create):
        if not rest:
            yield node, key
            continue
        if create and isinstance(node, dict) and node[key] is None:
            node[key] = {}
        yield from _fields(node[key], rest, create=create)


def _keys(node: Any, part: str, *, create: bool) -> list[Any]:
    if isinstance(node, list):
        if part == "*":
            return list(range(len(node)))
        if part.startswith("[") and "=" in part:
            name, _, value = part[1:-1].partition("=")
            return [
                index
                for index, element in enumerate(node)
                if isinstance(element, dict) and str(element.get(name)) == value
            ]
        return [int(part)] if part.isdigit() and int(part) < len(node) else []
    if not isinstance(node, dict):
        return []
    key = part[1:-1] if part.startswith("[") else part
    if key not in node:
        if not create:
            return []
        node[key] = None
    return [key]


def _converted(value: Any, existing: Any, path: str) -> Any:
    """Return a value as the type of the scalar that it replaces."""
    if isinstance(value, dict | list) or isinstance(existing, dict | list) or existing is None:
        return copy.deepcopy(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(existing, str):
        return text
    if isinstance(existing, bool):
        if text in {"true", "false"}:
            return text == "true"
    elif re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    raise ConfigError(f"{path} is {existing!r}: {value!r} has another type")


# --- patches --------------------------------------------------------------------------------------


def merge_patch(document: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """Return an object with a strategic merge patch applied.

    Maps are merged, null removes, and lists are replaced, except the keyed lists of built-in
    objects. ``$patch: delete`` removes an element of a keyed list, ``$patch: replace`` a map.

    Raises:
        ConfigError: The patch has another directive.
    """
    return _merged(document, patch, keyed=str(document.get("apiVersion")) in _BUILT_IN)


def _merged(document: Mapping[str, Any], patch: Mapping[str, Any], *, keyed: bool) -> Document:
    directive = patch.get(_DIRECTIVE)
    if directive == "replace":
        return {key: copy.deepcopy(v) for key, v in patch.items() if key != _DIRECTIVE}
    if directive is not None:
        raise ConfigError(f"a patch has an unsupported {_DIRECTIVE}: {directive!r}")
    result = dict(document)
    for key, value in patch.items():
        here = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = _merged(here if isinstance(here, Mapping) else {}, value, keyed=keyed)
        elif isinstance(value, list) and isinstance(here, list) and keyed and key in _MERGE_KEYS:
            result[key] = _merged_list(here, value, _MERGE_KEYS[key])
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_list(here: Sequence[Any], patch: Sequence[Any], key: str) -> list[Any]:
    """Merge elements by a key: the patch's elements in its order, then the others."""
    others = {element[key]: element for element in here}
    result = []
    for element in patch:
        old = others.pop(element[key], {})
        if element.get(_DIRECTIVE) != "delete":
            result.append(_merged(old, element, keyed=True))
    return [*result, *others.values()]


def json_patch(document: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]) -> Document:
    """Return an object with JSON Patch operations applied: add, replace, remove and test.

    Raises:
        ConfigError: An operation is malformed, or does not fit the object.
    """
    result = copy.deepcopy(dict(document))
    for operation in operations:
        _apply(result, operation)
    return result


def _apply(document: Any, operation: Mapping[str, Any]) -> None:
    name, path = operation.get("op"), str(operation.get("path", ""))
    *keys, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]] or [
        ""
    ]
    missing = ConfigError(f"a patch changes {path}, which does not exist")
    node = document
    for key in keys:
        index: Any = int(key) if isinstance(node, list) and key.isdigit() else key
        if not _has(node, index):
            raise missing
        node = node[index]
    value = copy.deepcopy(operation.get("value"))
    if isinstance(node, list) and name == "add":
        position = len(node) if last == "-" else int(last) if last.isdigit() else len(node) + 1
        if position > len(node):
            raise missing
        node.insert(position, value)
        return
    target: Any = int(last) if isinstance(node, list) and last.isdigit() else last
    if not _has(node, target) and not (name == "add" and isinstance(node, dict)):
        raise missing
    if name in {"add", "replace"}:
        node[target] = value
    elif name == "remove":
        del node[target]
    elif name != "test":
        raise ConfigError(f"a patch has an unsupported operation: {name!r}")
    elif node[target] != value:
        raise ConfigError(f"a patch expects {value!r} at {path}, which is {node[target]!r}")


def _has(node: Any, key: Any) -> bool:
    if isinstance(node, list):
        return isinstance(key, int) and key < len(node)
    return isinstance(node, dict) and key in node
