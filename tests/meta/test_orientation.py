"""The orientation pages match the tree: named paths exist, and no package is missing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SHARED_NAMES = {
    "AenvSandbox", "EnvironmentTool", "EnvironmentToolset", "Step", "ToolFailed",
}  # fmt: skip
"""Names of adapters that are documented, and that their frameworks have, too."""
PROJECTS = (
    "envs/", "cli/template/", "testing/contract_environment/", "integrations/verifiers_project/"
)  # fmt: skip


def paths(text: str) -> set[str]:
    named = re.findall(r"`([a-z_]+(?:/[\w.]+)*/?)`", text)
    roots = {path.name for path in ROOT.iterdir()}
    return {path.rstrip("/") for path in named if "/" in path and path.split("/")[0] in roots}


@pytest.mark.parametrize("path", sorted(paths(ARCHITECTURE) | paths(CONTRIBUTING)))
def test_a_path_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


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


def test_every_module_of_the_top_level_is_on_the_map() -> None:
    for path in sorted((ROOT / "aenv_ray").glob("*.py")):
        named = (f"`aenv_ray/{path.name}`", f"`{path.name}`")
        assert path.name.startswith("__") or any(name in ARCHITECTURE for name in named), path


def types_of(module: ast.Module) -> Iterator[str]:
    """Yield the names of the public classes and type aliases of a module."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            name = ast.unparse(node.target)
        elif type(node).__name__ == "TypeAlias":  # of Python 3.12
            name = ast.unparse(node.name)
        elif isinstance(node, ast.Assign) and is_type(node.value):
            name = ast.unparse(node.targets[0])
        else:
            continue
        if re.fullmatch("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
            yield name


def is_type(value: ast.expr) -> bool:
    """Return whether an assigned value is a type: `X[...]`, `X | Y` or `NewType(...)`."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) == "NewType"
    is_union = isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)
    return is_union or isinstance(value, ast.Subscript)


def test_no_two_public_types_share_a_name() -> None:
    """Classes and aliases, apart from those of environments, which are separate projects."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "aenv_ray").glob("**/*.py")):
        name = path.relative_to(ROOT / "aenv_ray").as_posix()
        if name.startswith(PROJECTS):
            continue
        for one in types_of(ast.parse(path.read_text(encoding="utf-8"))):
            found[one].append(name)
    shared = {name: homes for name, homes in found.items() if len(homes) > 1}
    assert not {name: homes for name, homes in shared.items() if name not in SHARED_NAMES}
    assert shared.keys() >= SHARED_NAMES, "names that no longer collide"


def test_every_place_of_the_repository_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", CONTRIBUTING, re.MULTILINE))
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    tests = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir()}
    hidden = {"tests/__pycache__", "dist"}
    assert (tops - {"tests", "dist"} | tests) - hidden == listed
