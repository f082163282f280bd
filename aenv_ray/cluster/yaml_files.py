"""YAML as Kubernetes' own tools read it: duplicate keys are errors, and ``yes`` is a string."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from aenv_ray.errors import ConfigError

_YAML: Any = yaml  # untyped
_MERGE: Final = "tag:yaml.org,2002:merge"
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, if PyYAML was built with it, because it is ten times as fast."""


class _Loader(_SafeLoader):  # type: ignore[misc]  # one of two classes
    """Parses booleans, integers, floats and null as YAML 1.2; everything else is a string."""


_Loader.yaml_implicit_resolvers = {}

for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _YAML.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first), Loader=_Loader
    )


def _mapping(loader: Any, node: Any) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag != _MERGE and key.value in seen:
            raise _YAML.constructor.ConstructorError(
                None, None, f"duplicate key {key.value!r}", key.start_mark
            )
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {
        str(loader.construct_object(k)): loader.construct_object(v, True) for k, v in node.value
    }


_YAML.add_constructor("tag:yaml.org,2002:map", _mapping, Loader=_Loader)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as block literals, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YAML.add_representer(str, _text, Dumper=_Dumper)


def parse(text: str, where: str) -> list[Any]:
    """Return the documents of a YAML text, without empty ones.

    Raises:
        ConfigError: It is invalid; the message names `where`.
    """
    try:
        found = list(_YAML.load_all(text, Loader=_Loader))
    except yaml.YAMLError as exc:
        raise ConfigError(
            f"{where} is not valid YAML: {' '.join(str(exc).split())}",
            hint="correct the YAML there",
        ) from exc
    return [document for document in found if document is not None]


def read(path: Path) -> list[Any]:
    """Return the documents of a YAML file.

    Raises:
        ConfigError: It cannot be read, or is not valid YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}", hint="give a readable YAML file in UTF-8"
        ) from exc
    return parse(text, str(path))


def dump(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as one YAML text, each beginning with its kind."""
    first = ("apiVersion", "kind", "metadata")
    ordered = [
        {key: document[key] for key in (*first, *document) if key in document}
        for document in documents
    ]
    return str(
        _YAML.dump_all(ordered, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    )
