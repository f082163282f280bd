"""``aenv init``: create an environment project from a template, offline."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from aenv_ray import ids
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption
from aenv_ray.cli.terminal.output import Format, show
from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically

TEMPLATES: Final = Path(__file__).parent / "template"
_CONFIG: Final = "config.json"

# Placeholders in the template's files. Each is valid in its place, so that the template itself is a
# project that loads, passes its tests and is checked by ruff.
_NAME: Final = "aenv-template-name"
_MODULE: Final = "aenv_template_module"
_VERSION: Final = "0.0.0-template"


def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Environment name, for example my-env.")
    ],
    version: Annotated[str, typer.Option("--version", "-v", help="Initial version.")] = "1.0.0",
    template: Annotated[
        str, typer.Option("--template", "-t", help="Template to copy.")
    ] = "default",
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="Directory to create the project directory in.")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the template's files; keep others.")
    ] = False,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Write only WORK_DIR/config.json.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Create an environment project and print its path.

    The project is created in WORK_DIR/NAME, with tests that pass.

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
        console.say(f"created the config of {console.strong(f'{name}@{version}')}")
        _show(name, version, target, output)
        return
    target = work_dir / name
    _make_project(target, files, force=force)
    console.say(f"created environment {console.strong(f'{name}@{version}')}")
    _show(name, version, target, output)
    _say_next_steps(target)


def _show(name: str, version: str, target: Path, output: Format | None) -> None:
    path = str(target.resolve())
    show({"name": name, "version": version, "path": path}, output, path)


def render(template: str, name: str, version: str) -> dict[str, str]:
    """Return the files of a new project: content by relative path.

    Raises:
        ConfigError: The template does not exist.
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
    """Return the name of the project's module: `name` as an identifier that shadows no module.

    The suffix prevents a project ``json`` from hiding the standard library's; the prefix prevents
    the loader and pytest from treating the module as a test.
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
    """Write the files; a new directory is created completely or not at all.

    Raises:
        ConfigError: The directory is not empty and `force` is not set, or cannot be written.
    """
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise ConfigError(
                f"directory {target} is not empty",
                hint="overwrite the template's files in it with --force; others are kept",
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
    """Replace each file atomically; other files are kept.

    Raises:
        ConfigError: A file cannot be written; earlier ones were.
    """
    umask = os.umask(0)
    os.umask(umask)
    for relative, content in files.items():
        path = directory / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, mode=0o666 & ~umask)
        except OSError as exc:
            raise _unwritable(path, exc) from exc


def _unwritable(path: Path, exc: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {exc.strerror}", hint="choose another --work-dir"
    )


def _say_next_steps(target: Path) -> None:
    path = shlex.quote(str(target))
    console.say(f"\nnext: aenv test {path}    # run its tests")
    console.say(f"      aenv run {path}     # serve it on this machine")
