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


EXHAUSTIVE = {
    "aenv_ray.cli", "aenv_ray.client", "aenv_ray.cluster", "aenv_ray.engines", "aenv_ray.hub",
    "aenv_ray.integrations", "aenv_ray.runtime", "aenv_ray.runtime.door", "aenv_ray.sampling",
    "aenv_ray.sampling.tasks", "aenv_ray.serve.gateway",
}  # fmt: skip
"""Packages of which each module has a layer."""


def test_a_module_without_a_layer_is_found(tmp_path: Path) -> None:
    """Otherwise a new module of these packages could import any other one."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    exhaustive = [one for one in contracts if one.get("exhaustive")]
    assert {name for one in exhaustive for name in one["containers"]} == EXHAUSTIVE
    for one in exhaustive:
        text = text.replace(f'layers = [\n  "{one["layers"][0]}",\n', "layers = [\n")
    config = tmp_path / "pyproject.toml"
    config.write_text(text)
    assert f"{len(EXHAUSTIVE)} broken" in lint(config).stdout


PROJECTS = ("envs/", "cli/template/", "runtime/shim/", "testing/contract_environment/")
"""Projects of environments, which are not packages of ours."""


def layers_of_contracts() -> list[set[str]]:
    """Return the modules that each contract with layers names."""
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return [
        {
            f"{container}.{name.strip(' ()')}".removeprefix(".")
            for container in contract.get("containers", [""])
            for row in contract["layers"]
            for name in row.split("|")
        }
        for contract in config["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]


def test_every_package_of_ours_has_its_place() -> None:
    """A new package needs a layer, at whatever depth; so does a new module at the top."""
    root = REPOSITORY / "aenv_ray"
    packages = {
        f"aenv_ray.{'.'.join(path.parent.relative_to(root).parts)}"
        for path in root.glob("*/**/__init__.py")
        if not path.relative_to(root).as_posix().startswith(PROJECTS)
    } - {"aenv_ray.actors"}
    modules = {f"aenv_ray.{path.stem}" for path in root.glob("*.py")} - {"aenv_ray.__init__"}
    first, *others = layers_of_contracts()
    top = {name for name in packages if name.count(".") == 1} | modules
    assert top <= first
    assert packages <= first.union(*others)
