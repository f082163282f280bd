"""``aenv init``: a new environment project from a template, offline, that works as it is made."""

from __future__ import annotations

import secrets
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from aenv_ray import ids
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output
from aenv_ray.cli.terminal.output import Format, show
from aenv_ray.errors import ConfigError

TEMPLATES: Final = Path(__file__).parent / "template"
_CONFIG: Final = "config.json"

# What the template's files are written with; each is valid where it stands, so that the template
# is itself a project that loads, passes its tests and is checked by ruff.
_NAME: Final = "aenv-template-name"
_MODULE: Final = "aenv_template_module"
_VERSION: Final = "0.0.0-template"


def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the environment, for example my-env.")
    ],
    version: Annotated[str, typer.Option("--version", "-v", help="Its first version.")] = "1.0.0",
    template: Annotated[str, typer.Option("--template", "-t", help="What to copy.")] = "default",
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="Where the project directory is made.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the template's own files, nothing else.")
    ] = False,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Write only WORK_DIR/config.json.")
    ] = False,
    output: Output = None,
) -> None:
    """Make a new environment project and print its path.

    It is made in WORK_DIR/NAME, complete with tests that pass. No server is asked.

    Example:
      aenv init todo
      aenv test todo
    """
    ids.check_environment_name(name)
    ids.split_reference(f"{name}@{version}")
    files = render(template, name, version)
    if config_only:
        target = work_dir / _CONFIG
        if target.exists() and not force:
            raise ConfigError(f"{target} exists already", hint="overwrite it with --force")
        _write(work_dir, {_CONFIG: files[_CONFIG]})
        console.say(f"wrote the config of {console.strong(f'{name}@{version}')}")
        _show(name, version, target, output)
        return
    target = work_dir / name
    _make_project(target, files, force=force)
    console.say(f"made environment {console.strong(f'{name}@{version}')}")
    _show(name, version, target, output)
    _say_next_steps(target)


def _show(name: str, version: str, target: Path, output: Format | None) -> None:
    path = str(target.resolve())
    show({"name": name, "version": version, "path": path}, output, path)


def render(template: str, name: str, version: str) -> dict[str, str]:
    """Return the files of a new project, content by relative path.

    Raises:
        ConfigError: There is no such template.
    """
    known = sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())
    if template not in known:
        raise ConfigError(
            f"there is no template {template!r}", hint=f"templates: {', '.join(known)}"
        )
    root = TEMPLATES / template
    values = {_NAME: name, _MODULE: module_name(name), _VERSION: version}
    files = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not _is_cache(relative):
            text = path.read_text(encoding="utf-8")
            files[_filled(relative.as_posix(), values)] = _filled(text, values)
    return files


def module_name(name: str) -> str:
    """Return the name of the project's module: `name` as an identifier that shadows no other.

    The suffix keeps ``json`` and ``random`` from hiding the standard library's, the prefix keeps
    the loader and pytest from taking the module for a test.
    """
    stem = name.replace("-", "_")
    if not stem.endswith("_env"):
        stem += "_env"
    return f"env_{stem}" if stem[0].isdigit() or stem.startswith("test_") else stem


def _is_cache(relative: Path) -> bool:
    return any(part.startswith((".pytest", ".ruff", "__pycache__")) for part in relative.parts)


def _filled(text: str, values: dict[str, str]) -> str:
    for token, value in values.items():
        text = text.replace(token, value)
    return text


def _make_project(target: Path, files: dict[str, str], *, force: bool) -> None:
    """Write the files: a new directory appears complete or not at all.

    Raises:
        ConfigError: The directory has content and `force` is not set, or cannot be written.
    """
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise ConfigError(
                f"directory {target} is not empty",
                hint="--force overwrites the template's own files in it and keeps all others",
            )
        _write(target, files)
        return
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} exists and is not a directory", hint="choose another name")
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        _write(partial, files)
        partial.replace(target)
    except OSError as exc:
        raise _unwritable(target, exc) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(directory: Path, files: dict[str, str]) -> None:
    """Write each file beside its place and rename it there; what else lies there stays.

    Raises:
        ConfigError: A file cannot be written; those before it are.
    """
    for relative, content in files.items():
        path = directory / relative
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(content, encoding="utf-8")
            partial.replace(path)
        except OSError as exc:
            partial.unlink(missing_ok=True)
            raise _unwritable(path, exc) from exc


def _unwritable(path: Path, exc: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {exc.strerror}", hint="choose another --work-dir"
    )


def _say_next_steps(target: Path) -> None:
    place = shlex.quote(str(target))
    console.say(f"\nnext: aenv test {place}    # run its tests")
    console.say(f"      aenv run {place}     # serve it on this machine")
