"""The command line's config file: AEnvironment's keys and ours, unknown ones kept, mode 0600.

The first that exists of ``~/.aenv/cli_config.json``, ``./.aenv/cli_config.json`` and
``/etc/aenv/cli_config.json`` is read. Reading makes none; what is missing in it has its default.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.local_fabric import write_private

FILE: Final = Path(".aenv", "cli_config.json")
SYSTEM_FILE: Final = Path("/etc/aenv/cli_config.json")
MASK: Final = "********"
_SECRET: Final = ("password", "api_key", "token", "secret")
_THEIR_DEFAULT_HUB: Final = "https://localhost:8080"
"""AEnvironment writes this into every file; nobody chose it."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Registry(_Section):
    """``build_config.registry``: where ``aenv build`` pushes to."""

    host: str = "docker.io"
    username: str = ""
    password: str = Field(default="", repr=False)
    namespace: str = "aenv"


class BuildSection(_Section):
    """``build_config``."""

    registry: Registry = Field(default_factory=Registry)


class HubSection(_Section):
    """``hub_config``: the gateway, as AEnvironment's EnvHub client is told it."""

    hub_backend: str = ""
    """Used where `Values.system_url` is not set."""
    api_key: str = Field(default="", repr=False)
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that one answer may take."""


class Values(_Section):
    """The values that commands use; the file may hold more."""

    system_url: str | None = None
    """The gateway."""
    owner: str | None = None
    """Of the instances that are made."""
    output: Literal["table", "json", "yaml"] = "table"
    """How results are printed where ``-o`` says nothing."""
    build_config: BuildSection = Field(default_factory=BuildSection)
    hub_config: HubSection = Field(default_factory=HubSection)

    @property
    def gateway(self) -> str | None:
        """The gateway's address; None: the file names none."""
        backend = self.hub_config.hub_backend
        return self.system_url or (backend if backend not in {"", _THEIR_DEFAULT_HUB} else None)


@dataclass(frozen=True)
class ConfigFile:
    """A config file as it is on disk.

    Attributes:
        path: Where it is, or would be written.
        data: What it holds; empty when there is none.
    """

    path: Path
    data: dict[str, Any]

    @property
    def values(self) -> Values:
        """What commands use of it.

        Raises:
            ConfigError: A value is of the wrong kind.
        """
        return _checked(self.data, self.path)

    @property
    def effective(self) -> dict[str, Any]:
        """What it holds, with defaults for what it does not."""
        return merged(defaults(), self.data)

    def write(self, data: Mapping[str, Any]) -> None:
        """Replace what it holds, for its owner alone.

        Raises:
            ConfigError: A value is of the wrong kind, or it cannot be written; nothing changed.
        """
        _checked(data, self.path)
        write_private(self.path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def with_value(self, key: str, text: str) -> dict[str, Any]:
        """Return what it would hold with a key set.

        Args:
            key: Dotted path.
            text: JSON, or else text as it is.

        Raises:
            ConfigError: No command and nothing in the file knows the key.
        """
        known = dict(leaves(self.effective))
        section = any(name.startswith(f"{key}.") for name in known)
        if key not in known and not section:
            raise _unknown(key, known)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if isinstance(known.get(key), str) and not isinstance(value, str | None):
            value = text  # a token or password of digits is text
        if section and not isinstance(value, dict):
            raise ConfigError(
                f"{key} is a section", hint=f"set one of its keys: {_below(key, known)}"
            )
        data = copy.deepcopy(self.data)
        place = data
        *sections, last = key.split(".")
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value
        return data

    def value(self, key: str) -> Any:
        """Return the value of a key, or a section.

        Raises:
            ConfigError: There is none.
        """
        place: Any = self.effective
        for name in key.split("."):
            if not isinstance(place, dict) or name not in place:
                raise _unknown(key, dict(leaves(self.effective)))
            place = place[name]
        return place


def find() -> ConfigFile:
    """Return the config file in use; with no data where there is none.

    Raises:
        ConfigError: It cannot be read or is no JSON object; it is never overwritten then.
    """
    path = path_in_use()
    return ConfigFile(path, _read(path) if path.is_file() else {})


def path_in_use() -> Path:
    """Return the path of the config file in use, or of the one that would be written."""
    return next((p for p in places() if p.is_file()), places()[0])


def places() -> tuple[Path, ...]:
    """Return where a config file is looked for, first to last."""
    return (Path.home() / FILE, Path.cwd() / FILE, SYSTEM_FILE)


def is_of_directory(path: Path) -> bool:
    """Return whether a config file came with the working directory rather than from its user."""
    return path == places()[1] != places()[0]


def read(path: Path) -> dict[str, Any]:
    """Return what a config file holds.

    Raises:
        ConfigError: It cannot be read, is no JSON object, or a value is of the wrong kind.
    """
    data = _read(path)
    _checked(data, path)
    return data


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from None
    except ValueError as exc:
        raise ConfigError(
            f"{path} is no JSON: {exc}", hint="mend it by hand, or start over: aenv config reset"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object", hint="start over: aenv config reset")
    return data


def defaults() -> dict[str, Any]:
    """Return a file's content when nobody changed anything."""
    return Values().model_dump(mode="json")


def merged(data: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, deeply; `more` wins."""
    result = dict(data)
    for key, value in more.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def masked(data: Any, name: str = "") -> Any:
    """Return data with its secrets replaced; one that is empty shows that it is."""
    if isinstance(data, dict):
        return {key: masked(value, key) for key, value in data.items()}
    if isinstance(data, list):
        return [masked(item, name) for item in data]
    return MASK if data and is_secret(name) else data


def without_secrets(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data without the keys that hold secrets."""
    return {
        key: _without(value)
        for key, value in data.items()
        if isinstance(value, dict) or not is_secret(key)
    }


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return without_secrets(value)
    return [_without(item) for item in value] if isinstance(value, list) else value


def is_secret(name: str) -> bool:
    """Return whether a key holds a secret."""
    return name.lower().endswith(_SECRET)


def _checked(data: Mapping[str, Any], path: Path) -> Values:
    try:
        return Values.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}",
                          hint=f"mend it with: aenv config set {key} VALUE") from None  # fmt: skip


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _below(section: str, known: Mapping[str, Any]) -> str:
    return ", ".join(name for name in known if name.startswith(f"{section}."))


def _unknown(key: str, known: Mapping[str, Any]) -> ConfigError:
    last = key.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == last]
    close = close or difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"keys: {', '.join(sorted(known))}"
    return ConfigError(f"there is no config key {key!r}", hint=hint)
