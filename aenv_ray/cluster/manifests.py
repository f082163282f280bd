"""The manifests of a cluster: the bundled ones, or the user's."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from aenv_ray.cluster import kustomize, settings_check, yaml_files
from aenv_ray.cluster.objects import Document
from aenv_ray.errors import ConfigError

_PACKAGED: Final = Path(__file__).with_name("kuberay")
_CHECKOUT: Final = Path(__file__).parents[2] / "clusters" / "kuberay"
VALUES: Final = "Values"
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "true or false"), (int, "a whole number"), (list, "a list"), (dict, "a mapping"),
)  # fmt: skip
"""Kinds of values that no other kind can replace; text may be a number."""


def bundled() -> Path:
    """Return the directory of the bundled manifests.

    Raises:
        ConfigError: The installation has none.
    """
    for place in (_PACKAGED, _CHECKOUT):
        if (place / "base" / kustomize.FILE).is_file():
            return place
    raise ConfigError("this installation has no manifests", hint="reinstall aenv-ray")


def overlays() -> list[str]:
    """Return the names of the bundled overlays."""
    return sorted(path.name for path in (bundled() / "overlays").iterdir() if path.is_dir())


class Alert(NamedTuple):
    """An alert of the bundled rules for Prometheus."""

    name: str
    summary: str
    """A sentence."""
    first_step: str
    """A command."""


def alerts(namespace: str) -> list[Alert]:
    """Return the alerts of ``monitoring/pod-monitor.yaml``.

    Args:
        namespace: The namespace of the cluster; the commands name it.
    """
    documents = yaml_files.read(bundled() / "monitoring" / "pod-monitor.yaml")
    return [
        Alert(rule["alert"], rule["annotations"]["summary"],
              _in_namespace(rule["annotations"]["first_step"], namespace))
        for document in documents
        for group in document["spec"].get("groups", ())
        for rule in group["rules"]
    ]  # fmt: skip


def _in_namespace(command: str, namespace: str) -> str:
    """Return a command of the run book, which is written for the namespace aenv, for another."""
    if namespace == "aenv":
        return command
    if command.startswith("aenv cluster"):
        return f"{command} -n {namespace}"
    return command.replace("-n aenv ", f"-n {namespace} ")


def copy_to(directory: Path) -> None:
    """Copy the bundled manifests, so that the user can change them.

    Raises:
        ConfigError: The directory exists, or cannot be written.
    """
    try:
        shutil.copytree(bundled(), directory, ignore=shutil.ignore_patterns("image"))
    except FileExistsError:
        raise ConfigError(
            f"{directory} exists already", hint="choose a directory that does not exist"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"{directory} cannot be written: {exc}", hint="choose a directory that you can write to"
        ) from exc


def load(
    source: str, values: Path | None = None, settings: Mapping[str, str] | None = None
) -> list[Document]:
    """Return the objects of a cluster.

    Args:
        source: Name of a bundled overlay, a directory with a ``kustomization.yaml``, or a YAML file
            of rendered objects.
        values: File with values that override those of the overlay. None: no overrides.
        settings: Single values by name, such as ``workers.maxReplicas``, which override both.

    Raises:
        ConfigError: The source or a value does not exist, or something is malformed.
    """
    path = Path(source)
    is_name = path.name == source and source in overlays() and not path.exists()
    if path.is_file():
        if values or settings:
            raise ConfigError(
                f"{source} is a rendered file, which values cannot change",
                hint="pass an overlay or a directory instead",
            )
        rendered = [dict(document) for document in yaml_files.read(path)]
        settings_check.check_settings(rendered)
        return rendered
    if not is_name and not path.is_dir():
        raise ConfigError(
            f"no overlay, directory or file is named {source!r}",
            hint=f"overlays: {', '.join(overlays())}",
        )
    directory = bundled() / "overlays" / source if is_name else path
    given = _read(values) if values else {}
    changed = 0

    def change(document: Document) -> Document:
        nonlocal changed
        if document["kind"] != VALUES:
            return document
        changed += 1
        spec = _merged(document["spec"], given)
        for name, text in (settings or {}).items():
            _set(spec, name, text)
        _check_kinds(document["spec"], spec)
        settings_check.check_values(spec)
        return {**document, "spec": spec}

    objects = kustomize.render(directory, change)
    if (values or settings) and not changed:
        raise ConfigError(
            f"{source} includes no object of kind {VALUES}, so it has no values to change",
            hint="start from a copy of an overlay: aenv cluster render --copy-to DIRECTORY",
        )
    settings_check.check_settings(objects)
    return objects


def namespace_of(documents: Sequence[Document]) -> str:
    """Return the namespace of a cluster's objects.

    Raises:
        ConfigError: They are in several namespaces, or in none.
    """
    found = {document["metadata"].get("namespace") for document in documents} - {None}
    if len(found) != 1:
        raise ConfigError(
            f"a cluster must be in one namespace; this one is in {sorted(found)}",
            hint="set the namespace in values.yaml or in the kustomization",
        )
    return str(found.pop())


def _read(path: Path) -> dict[str, Any]:
    documents = yaml_files.read(path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigError(f"{path} has no values: expected one YAML mapping")
    found = documents[0]
    return dict(found["spec"] if found.get("kind") == VALUES else found)


def _merged(spec: Mapping[str, Any], given: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return values overridden by given ones; maps that Kubernetes defines are replaced whole."""
    result = copy.deepcopy(dict(spec))
    for name, value in given.items():
        here = f"{above}{name}"
        if name not in result:
            raise _unknown(here, result, above)
        if not above and isinstance(result[name], dict):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"value {here} is a group of values and cannot be {value!r}",
                    hint=f"set one of its values: {here}.NAME",
                )
            result[name] = _merged(result[name], value, f"{here}.")
        else:
            result[name] = copy.deepcopy(value)
    return result


def _set(spec: dict[str, Any], name: str, text: str) -> None:
    """Set one value by name; keys of a map that Kubernetes defines may be new."""
    keys = name.split(".")
    node, above = spec, ""
    for key in keys[:-1]:
        if not isinstance(node.get(key), dict):
            raise _unknown(f"{above}{key}", node, above)
        node, above = node[key], f"{above}{key}."
    if keys[-1] not in node and len(keys) < 3:
        raise _unknown(name, node, above)
    parsed = yaml_files.parse(text, f"value {name}")
    node[keys[-1]] = parsed[0] if parsed else ""


def _check_kinds(defaults: Mapping[str, Any], spec: Mapping[str, Any], above: str = "") -> None:
    """Check that values are of the same kind as those of the overlay that they replace."""
    for name, default in defaults.items():
        value, here = spec[name], f"{above}{name}"
        expected = next((words for kind, words in _KINDS if isinstance(default, kind)), None)
        if isinstance(default, dict) and isinstance(value, dict):
            if not above:
                _check_kinds(default, value, f"{here}.")
        elif expected is not None and _kind_of(value) != _kind_of(default):
            raise ConfigError(
                f"value {here} is {value!r}, and must be {expected}",
                hint=f"write it as the overlay does: {default!r}",
            )


def _kind_of(value: Any) -> type | None:
    return next((kind for kind, _ in _KINDS if isinstance(value, kind)), None)


def _unknown(name: str, known: Mapping[str, Any], above: str) -> ConfigError:
    names = ", ".join(f"{above}{key}" for key in known)
    return ConfigError(f"unknown value {name}", hint=f"values: {names}")
