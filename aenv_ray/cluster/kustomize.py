"""Manifests from a directory with a ``kustomization.yaml``, as ``kubectl kustomize`` makes them.

Of kustomize, what our own manifests use: resources, components, patches, labels and replacements.
What else a kustomization asks for is refused, never left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.cluster import field_paths, patches, yaml_files
from aenv_ray.errors import ConfigError

FILE: Final = "kustomization.yaml"
LOCAL: Final = "config.kubernetes.io/local-config"
"""Annotation of what is read here and not sent to a cluster."""
_KNOWN: Final = frozenset(
    {"apiVersion", "kind", "resources", "components", "patches", "labels", "replacements"}
)

Document = dict[str, Any]


def render(directory: Path, change: Callable[[Document], Document] | None = None) -> list[Document]:
    """Return the objects that a kustomization makes, in its order.

    Args:
        directory: Holds the ``kustomization.yaml``.
        change: Applied to every object as it is read from its file. None: nothing is changed.

    Raises:
        ConfigError: A file is missing or malformed, or asks for what is not known here.
    """
    found = _Kustomization(directory, change or (lambda document: document)).objects([])
    return [document for document in found if not _is_local(document)]


def _is_local(document: Document) -> bool:
    annotations = document.get("metadata", {}).get("annotations") or {}
    return str(annotations.get(LOCAL, "")).lower() == "true"


class _Kustomization:
    """One directory."""

    def __init__(self, directory: Path, change: Callable[[Document], Document]) -> None:
        self._directory = directory
        self._change = change
        path = directory / FILE
        documents = yaml_files.read(path)
        if len(documents) != 1 or not isinstance(documents[0], dict):
            raise ConfigError(f"{path} is no kustomization")
        self._content = documents[0]
        unknown = sorted(set(self._content) - _KNOWN)
        if unknown:
            raise ConfigError(
                f"{path} has {', '.join(unknown)}, which is not understood here",
                hint=f"kubectl kustomize {directory} > all.yaml; then: aenv cluster apply all.yaml",
            )

    def objects(self, above: list[Document]) -> list[Document]:
        """Return its objects; a component changes those `above` it as well."""
        found = list(above)
        for entry in self._content.get("resources") or []:
            found += self._resource(entry)
        for entry in self._content.get("components") or []:
            found = _Kustomization(self._directory / entry, self._change).objects(found)
        for entry in self._content.get("patches") or []:
            self._patch(found, entry)
        for entry in self._content.get("labels") or []:
            _label(found, entry)
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
                raise ConfigError(f"{path} holds something that is no object of Kubernetes")
        return [self._change(document) for document in documents]

    def _patch(self, found: list[Document], entry: Mapping[str, Any]) -> None:
        text = entry.get("patch")
        where = f"a patch of {self._directory / FILE}"
        if entry.get("path"):
            documents = yaml_files.read(self._directory / str(entry["path"]))
        else:
            documents = yaml_files.parse(str(text), where)
        for patch in documents:
            target = entry.get("target")
            if target is None:
                if not isinstance(patch, dict) or "kind" not in patch:
                    raise ConfigError(f"{where} has no target")
                target = {"kind": patch["kind"], "name": re.escape(patch["metadata"]["name"])}
            places = [n for n, document in enumerate(found) if _is_meant(document, target)]
            if not places and "target" not in entry:
                raise ConfigError(f"{where} is for {target}, which there is not")
            for place in places:
                changed = patches.json_patch if isinstance(patch, list) else patches.merge
                found[place] = changed(found[place], patch)


def _is_meant(document: Document, target: Mapping[str, Any]) -> bool:
    """Whether a patch's target, whose words are regular expressions, is this object."""
    unknown = set(target) - {"group", "version", "kind", "name", "namespace"}
    if unknown:
        raise ConfigError(f"a patch's target has {', '.join(sorted(unknown))}, not known here")
    group, _, version = str(document.get("apiVersion")).rpartition("/")
    metadata = document["metadata"]
    facts = {
        "group": group,
        "version": version,
        "kind": document["kind"],
        "name": metadata.get("name", ""),
        "namespace": metadata.get("namespace", ""),
    }
    return all(re.fullmatch(str(wanted), str(facts[word])) for word, wanted in target.items())


def _label(found: list[Document], entry: Mapping[str, Any]) -> None:
    if entry.get("includeSelectors") or entry.get("includeTemplates") or entry.get("fields"):
        raise ConfigError(
            "labels with includeSelectors, includeTemplates or fields: not known here"
        )
    for document in found:
        document["metadata"].setdefault("labels", {}).update(entry["pairs"])


def _replace(found: list[Document], entry: Mapping[str, Any]) -> None:
    source = dict(entry["source"])
    path = source.pop("fieldPath", "metadata.name")
    sources = [document for document in found if _is_selected(document, source)]
    if len(sources) != 1:
        raise ConfigError(f"{len(sources)} objects are the source {source}; there must be one")
    value = field_paths.get(sources[0], path)
    if value in (None, {}, []):
        raise ConfigError(f"{source['kind']} {source.get('name', '')} has nothing at {path}")
    value = copy.deepcopy(value)
    for target in entry["targets"]:
        options = target.get("options") or {}
        if set(options) - {"create"} or target.get("reject"):
            raise ConfigError("replacements with delimiter, index or reject: not known here")
        for document in found:
            if not _is_selected(document, target["select"]):
                continue
            for place in target["fieldPaths"]:
                create = bool(options.get("create"))
                if not field_paths.put(document, place, value, create=create):
                    name = document["metadata"].get("name")
                    raise ConfigError(f"{document['kind']} {name} has nothing at {place}")


def _is_selected(document: Document, select: Mapping[str, Any]) -> bool:
    group, _, version = str(document.get("apiVersion")).rpartition("/")
    facts = {"group": group, "version": version, "kind": document["kind"]}
    facts |= {key: document["metadata"].get(key, "") for key in ("name", "namespace")}
    return all(facts.get(word) == wanted for word, wanted in select.items())
