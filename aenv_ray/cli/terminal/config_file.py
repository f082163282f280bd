"""The command line's config file: AEnvironment's keys and ours; unknown keys are kept.

The first existing file of ``~/.aenv/cli_config.json``, ``./.aenv/cli_config.json`` and
``/etc/aenv/cli_config.json`` is read. Missing keys have defaults. It is written with mode 0600.
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
from aenv_ray.validation import problems_of

FILE: Final = Path(".aenv", "cli_config.json")
SYSTEM_FILE: Final = Path("/etc/aenv/cli_config.json")
MASK: Final = "********"
_SECRET: Final = ("password", "api_key", "token", "secret")
_THEIR_DEFAULT_HUB: Final = "https://localhost:8080"
"""AEnvironment writes this default into every file, so it counts as not set."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class RegistrySettings(_Section):
    """``build_config.registry``: the registry that ``aenv build`` pushes to."""

    host: str = "docker.io"
    username: str = ""
    password: str = Field(default="", repr=False)
    namespace: str = "aenv"


class BuildSection(_Section):
    """``build_config``."""

    registry: RegistrySettings = Field(default_factory=RegistrySettings)


class HubSection(_Section):
    """``hub_config``: the gateway, under the keys of AEnvironment's EnvHub client."""

    hub_backend: str = ""
    """Used if `Values.system_url` is not set."""
    api_key: str = Field(default="", repr=False)
    timeout: float = Field(default=30.0, gt=0)
    """Timeout for one response, in seconds."""


class Values(_Section):
    """The keys that commands use; the file may have more."""

    system_url: str | None = None
    """Address of the gateway."""
    owner: str | None = None
    """Default owner of new instances, services and tokens."""
    output: Literal["table", "json", "yaml"] = "table"
    """Output format without ``-o``."""
    build_config: BuildSection = Field(default_factory=BuildSection)
    hub_config: HubSection = Field(default_factory=HubSection)

    @property
    def gateway(self) -> str | None:
        """The gateway's address; None if the file has none."""
        backend = self.hub_config.hub_backend
        return self.system_url or (backend if backend not in {"", _THEIR_DEFAULT_HUB} else None)


@dataclass(frozen=True)
class ConfigFile:
    """A config file on disk.

    Attributes:
        path: Its path; the file may not exist yet.
        data: Its content; empty if there is no file.
    """

    path: Path
    data: dict[str, Any]

    @property
    def values(self) -> Values:
        """The content, validated.

        Raises:
            ConfigError: A value has the wrong type.
        """
        return _checked(self.data, self.path)

    @property
    def effective(self) -> dict[str, Any]:
        """The content, with defaults for missing keys."""
        return merged(defaults(), self.data)

    def write(self, data: Mapping[str, Any]) -> None:
        """Replace the file.

        Raises:
            ConfigError: A value has the wrong type, or the file cannot be written; it is unchanged.
        """
        _checked(data, self.path)
        write_private(self.path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def with_value(self, key: str, text: str) -> dict[str, Any]:
        """Return the content with one key changed.

        Args:
            key: Dotted path.
            text: JSON, or else plain text.

        Raises:
            ConfigError: The key is neither known nor in the file.
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
        node = data
        *sections, last = key.split(".")
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
        return data

    def value(self, key: str) -> Any:
        """Return the value of a key or section.

        Raises:
            ConfigError: It does not exist.
        """
        node: Any = self.effective
        for name in key.split("."):
            if not isinstance(node, dict) or name not in node:
                raise _unknown(key, dict(leaves(self.effective)))
            node = node[name]
        return node


def find() -> ConfigFile:
    """Return the config file in use; without data if there is none.

    Raises:
        ConfigError: It cannot be read, or is not a JSON object.
    """
    path = path_in_use()
    return ConfigFile(path, _read(path) if path.is_file() else {})


def path_in_use() -> Path:
    """Return the path of the config file in use, or of the one that would be created."""
    return next((p for p in search_paths() if p.is_file()), search_paths()[0])


def search_paths() -> tuple[Path, ...]:
    """Return the paths of config files, in the order of precedence."""
    return (Path.home() / FILE, Path.cwd() / FILE, SYSTEM_FILE)


def is_of_directory(path: Path) -> bool:
    """Return whether a config file is that of the working directory, not of the user."""
    return path == search_paths()[1] != search_paths()[0]


def read(path: Path) -> dict[str, Any]:
    """Return the content of a config file.

    Raises:
        ConfigError: It cannot be read, is not a JSON object, or a value has the wrong type.
    """
    data = _read(path)
    _checked(data, path)
    return data


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}", hint="make it readable for your user"
        ) from None
    except ValueError as exc:
        raise ConfigError(
            f"{path} is not JSON: {exc}", hint="correct it, or reset it with: aenv config reset"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object", hint="reset it with: aenv config reset")
    return data


def defaults() -> dict[str, Any]:
    """Return the default settings."""
    return Values().model_dump(mode="json")


def merged(data: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both merged deeply; `more` wins."""
    result = dict(data)
    for key, value in more.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def masked(data: Any, name: str = "") -> Any:
    """Return data with non-empty secrets masked."""
    if isinstance(data, dict):
        return {key: masked(value, key) for key, value in data.items()}
    if isinstance(data, list):
        return [masked(item, name) for item in data]
    return MASK if data and is_secret(name) else data


def without_secrets(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data without secret keys."""
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
    """Return whether the value of a key is a secret."""
    return name.lower().endswith(_SECRET)


def _checked(data: Mapping[str, Any], path: Path) -> Values:
    try:
        return Values.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(
            f"{path}: {problems_of(exc)}", hint="correct it: aenv config set KEY VALUE"
        ) from None


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
    return ConfigError(f"unknown config key {key!r}", hint=hint)
