"""``aenv version``: installed versions, from package metadata."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Final

import typer

import aenv_ray
from aenv_ray.cli.terminal.options import Output
from aenv_ray.cli.terminal.output import Format, show

_PACKAGES: Final = ("ray", "fastmcp", "mcp")


def version(
    short: Annotated[
        bool, typer.Option("--short", "-s", help="Only the version of aenv-ray.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Same as -o json.")] = False,
    output: Output = None,
) -> None:
    """Show the versions of aenv-ray and of the packages it runs on.

    Example:
      aenv version --json
    """
    facts: dict[str, str | None] = {"aenv-ray": aenv_ray.__version__}
    if not short:
        facts["python"] = platform.python_version()
        facts |= {name: _installed(name) for name in _PACKAGES}
        facts["platform"] = platform.platform()
    lines = {name: value or "not installed" for name, value in facts.items()}
    show(facts, Format.JSON if as_json else output, aenv_ray.__version__ if short else lines)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
