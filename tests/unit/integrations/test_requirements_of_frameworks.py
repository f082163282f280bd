"""A framework that is missing, or of another version, is named with the way to install it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import aenv_ray.integrations
from aenv_ray.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _requirements() -> dict[str, tuple[str, ...]]:
    """Return the first arguments of `require` by adapter: package, extra, and range."""
    found = {}
    for path in sorted(Path(aenv_ray.integrations.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require":
                given = tuple(one.value for one in call.args if isinstance(one, ast.Constant))
                found.setdefault(path.stem, given)
    return found


REQUIRED = _requirements()
WITH_EXTRA = sorted(module for module, given in REQUIRED.items() if given[1])


@pytest.mark.parametrize("module", WITH_EXTRA)
def test_the_extra_installs_the_range(module: str) -> None:
    package, extra, minimum, below = REQUIRED[module]
    installed = [Requirement(line) for line in EXTRAS[extra]]
    [range_] = [one.specifier for one in installed if one.name == package]
    assert below in {one.version for one in range_ if one.operator == "<"}
    if module != "nemo_gym_sandbox":  # of a later version than the extra's other adapter
        assert minimum in {one.version for one in range_ if one.operator == ">="}


@pytest.mark.parametrize("installed", [None, "99.0"])
@pytest.mark.parametrize("module", WITH_EXTRA)
def test_the_extra_and_the_range_are_named(
    module: str, installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra, minimum, below = REQUIRED[module]
    version = importlib.metadata.version

    def found(name: str) -> str:
        if name != package:
            return "1.0" if name in {"gymnasium", "stable-baselines3"} else version(name)
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", found)
    name = f"aenv_ray.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if module in {"rllib", "stable_baselines3"}:  # they build on Gymnasium's, which is not here
        monkeypatch.setitem(sys.modules, "aenv_ray.integrations.gymnasium", _Gymnasium)
    with pytest.raises(ConfigError, match=f"{package}>={minimum},<{below}") as caught:
        importlib.import_module(name)
    [line] = [one for one in EXTRAS[extra] if Requirement(one).name == package]
    python = re.search(r"python_version >= '(.*)'", line)
    more = f" with Python {python[1]} or later" if python else ""
    assert caught.value.hint == f"pip install 'aenv-ray[{extra}]'{more}"


class _Gymnasium:
    Step = ToolEnv = ToolGame = VectorToolEnv = object
