"""The orientation pages match the tree: named paths exist, and no package is missing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PLANNED = {"aenv_ray/integrations"}
"""Where a new part goes although nothing is there yet."""


def paths(text: str) -> set[str]:
    named = re.findall(r"`([a-z_]+(?:/[\w.]+)*/?)`", text)
    roots = {path.name for path in ROOT.iterdir()}
    return {path.rstrip("/") for path in named if "/" in path and path.split("/")[0] in roots}


@pytest.mark.parametrize("path", sorted(paths(ARCHITECTURE) | paths(CONTRIBUTING)))
def test_a_path_that_is_named_exists(path: str) -> None:
    assert path in PLANNED or (ROOT / path).exists()


def test_a_file_name_after_a_path_is_beside_it() -> None:
    """`a/b.py` (`c.py`): the short name means the same directory."""
    for line in ARCHITECTURE.split("\n\n"):
        directory: Path | None = None
        for name in re.findall(r"`([\w/]+\.py)`", line):
            if "/" in name:
                path = ROOT / name
                path = path if path.exists() else ROOT / "aenv_ray" / name
                assert path.exists(), name
                directory = path.parent
            else:
                assert directory is not None, name
                assert (directory / name).exists(), f"{name} is not in {directory}"


def test_every_package_is_on_the_map() -> None:
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("*/__init__.py", "*/*/__init__.py")
        for path in (ROOT / "aenv_ray").glob(pattern)
    }
    parents = {package.rpartition("/")[0] for package in packages}
    for package in sorted(packages - parents):
        name = package.rpartition("/")[2]
        assert f"`{package}`" in ARCHITECTURE or f"`{name}`" in ARCHITECTURE, package


def test_no_two_public_classes_share_a_name() -> None:
    """Apart from environments, which are separate projects, and adapters of frameworks."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "aenv_ray").glob("**/*.py")):
        name = path.relative_to(ROOT / "aenv_ray").as_posix()
        if name.startswith(("envs/", "integrations/", "cli/template/", "testing/contract_env")):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    assert not {name: homes for name, homes in found.items() if len(homes) > 1}


def test_every_place_of_the_repository_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", CONTRIBUTING, re.MULTILINE))
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    tests = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir()}
    hidden = {"tests/__pycache__", "tests/startup", "dist"}
    assert (tops - {"tests", "dist"} | tests) - hidden == listed
