"""``aenv version``: what is installed, read from package metadata without importing anything."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from enum import StrEnum
from typing import Annotated, Final

import typer

import aenv_ray

_PACKAGES: Final = ("ray", "fastmcp", "mcp")


class Output(StrEnum):
    """How the result is printed."""

    TABLE = "table"
    JSON = "json"


def version(
    short: Annotated[bool, typer.Option("--short", "-s", help="Only aenv-ray's version.")] = False,
    as_json: Annotated[bool, typer.Option("--json", "-j", help="Same as -o json.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.TABLE,
) -> None:
    """Show the versions of aenv-ray and of what it runs on.

    Example:
      aenv version --json
    """
    facts: dict[str, str | None] = {"aenv-ray": aenv_ray.__version__}
    if not short:
        facts["python"] = platform.python_version()
        facts |= {name: _installed(name) for name in _PACKAGES}
        facts["platform"] = platform.platform()
    if as_json or output is Output.JSON:
        print(json.dumps(facts, indent=2))
    elif short:
        print(aenv_ray.__version__)
    else:
        for name, value in facts.items():
            print(f"{name:<9} {value or 'not installed'}")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
