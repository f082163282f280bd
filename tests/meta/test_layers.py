"""Imports run one way (the contracts are in pyproject's ``tool.importlinter``)."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a configuration."""
    program = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    return subprocess.run(
        [sys.executable, "-c", program, "--config", str(config), "--no-cache"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def test_imports_run_one_way() -> None:
    done = lint(REPOSITORY / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_check_finds_what_it_is_for(tmp_path: Path) -> None:
    """With the lowest layer moved to the top, the check fails."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    swapped = text.replace('"aenv_ray.errors",\n]', ']', 1).replace(
        'layers = [\n', 'layers = [\n  "aenv_ray.errors",\n', 1
    )  # fmt: skip
    assert swapped != text
    config = tmp_path / "pyproject.toml"
    config.write_text(swapped)
    assert "broken" in lint(config).stdout
    assert lint(config).returncode != 0


def test_every_package_of_ours_has_its_place() -> None:
    """A new package needs a layer."""
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    layers = next(
        contract["layers"] for contract in config["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )  # fmt: skip
    placed = {
        name.strip(" ()").removeprefix("aenv_ray.") for row in layers for name in row.split("|")
    }
    root = REPOSITORY / "aenv_ray"
    packages = {path.parent.name for path in root.glob("*/__init__.py")} - {"actors"}
    packages |= {f"actors.{path.parent.name}" for path in root.glob("actors/*/__init__.py")}
    modules = {path.stem for path in root.glob("*.py")} - {"__init__"}
    assert packages | modules <= placed
