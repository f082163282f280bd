"""Reading the files of a task, with errors that name the file and the field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.validation import problems_of

Model = TypeVar("Model", bound=BaseModel)

_YAML: Any = yaml  # untyped

MAX_BYTES: Final = 4 << 20
"""Largest description of a task."""
_HIDES_PLUGIN: Final = re.compile(  # a new PYTHONPATH for pytest, or options that ignore it
    r"\bPYTHONPATH=(?!\S*\$\{?PYTHONPATH)\S*\s(.*\W)?pytest\b"
    r"|\bpython[\d.]*\s(-\w+\s+)*-[A-LN-Za-ln-z]*[IE][A-Za-z]*\s(.*\W)?pytest\b"
)
_REPLACES_PATH: Final = re.compile(
    r"^(export\s+)?PYTHONPATH=(?!\S*\$\{?PYTHONPATH)[^\s;&|]*\s*($|;|&&)|\bunset\s.*\bPYTHONPATH\b"
)
_DOWNLOADS: Final = re.compile(
    r"\b(curl|wget|uvx?|pip[\d.]*|pipx|apt|apt-get|apk|dnf|yum|npm|npx|yarn|pnpm|conda|mamba|cargo|gem)\b"
    r"|\bgit\s+(clone|fetch|pull|submodule)\b|\bgo\s+(get|install|mod)\b"
)
_SCRIPTS: Final = frozenset({".sh", ".bash", ".yaml"})
GRACE_S: Final = 60.0
"""How much longer than the tests the call of the reward may take."""


@dataclass(frozen=True)
class FormatOptions:
    """What the operator allows, as far as it decides how tasks are played."""

    may_use_internet: bool = True


def text_of(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: It does not exist, is not text, or is too large.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_BYTES} bytes", hint="keep large data in the image"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: the file is missing", hint="restore it from the benchmark's repository"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}", hint="make it a readable file in UTF-8"
        ) from exc


def from_toml(path: Path, model: type[Model]) -> Model:
    """Return the content of a TOML file.

    Raises:
        ConfigError: It is malformed; the message names the field.
    """
    try:
        data = tomllib.loads(text_of(path))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: {exc}", hint="correct the TOML there") from None
    return checked(path, data, model)


def from_yaml(path: Path, model: type[Model]) -> Model:
    """Return the content of a YAML file.

    Raises:
        ConfigError: It is malformed; the message names the field.
    """
    return checked(path, yaml_of(path, text_of(path)), model)


def yaml_of(path: Path, text: str) -> Any:
    """Return the data of YAML text.

    Raises:
        ConfigError: It is malformed.
    """
    try:
        return _YAML.safe_load(text)
    except (yaml.YAMLError, RecursionError) as exc:
        raise ConfigError(
            f"{path}: {' '.join(str(exc).split())}", hint="correct the YAML there"
        ) from None


def checked(path: Path, data: Any, model: type[Model]) -> Model:
    """Return data as a model.

    Raises:
        ConfigError: A field is missing or has a wrong value.
    """
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {problems_of(exc)}", hint="correct these fields") from None


def expect(path: Path) -> Path:
    """Return the path of a file that must exist.

    Raises:
        ConfigError: It does not.
    """
    if not path.exists():
        raise ConfigError(
            f"{path}: the file is missing", hint="restore it from the benchmark's repository"
        )
    return path


def lacks_of_network(options: FormatOptions, paths: Iterable[Path]) -> Iterator[str]:
    """Yield the internet if a task whose format gives it needs it, and the operator forbids it.

    Args:
        options: What the operator allows.
        paths: Its scripts, and directories of them. Without the internet, tests that install pytest
            would fail whatever the agent did, and so would a solution that installs something.
    """
    if options.may_use_internet:
        return
    files = [one for path in paths for one in (path.rglob("*") if path.is_dir() else [path])]
    for file in sorted(one for one in files if one.suffix in _SCRIPTS and one.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        found = next(filter(None, map(_DOWNLOADS.search, lines)), None)
        if found is not None:
            why = f"{found[0]!r} in its {file.name}"
            yield f"the internet for {why}, which AENV_ALLOW_NETWORKS does not allow"
            return


def lacks_of_script(path: Path) -> Iterator[str]:
    """Yield what the script of the tests needs that the grader does not give.

    The grader's plugin of pytest is found by ``PYTHONPATH``. Without it pytest would fail, which is
    no verdict on the agent; afterwards the output may be the agent's, so this is known before.
    """
    script = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    lines = [line for line in map(str.strip, script.splitlines()) if not line.startswith("#")]
    replaces = next((n for n, line in enumerate(lines) if _REPLACES_PATH.search(line)), len(lines))
    is_late = any("pytest" in line for line in lines[replaces:])
    if is_late or any(map(_HIDES_PLUGIN.search, lines)):
        yield f"a pytest in {path.name} without the variable PYTHONPATH that the grader sets"
