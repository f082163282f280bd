"""Loads a project's code, so that what it registers is in the registry, or says why it does not.

A project directory holds ``src/*.py`` and packages below it, or the files directly. Each module is
imported once under its ordinary name, so that siblings import each other, relatively inside
packages, and dataclasses, pickling and ``inspect`` work; `package_root` says what changes where the
directory is a package itself. A failure is raised with its traceback: an environment is never
healthy with no tools.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from aenv_ray.runtime.api import compat
from aenv_ray.runtime.api.package_root import imports_beyond, make_package
from aenv_ray.runtime.api.registry import Registry, get_registry
from aenv_ray.runtime.faults import ProjectLoadError

_SKIPPED_DIRECTORIES: Final = frozenset(
    {"tests", "test", "__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
)

_OURS: Final = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("runtime", "engines"))


def load_project(path: str | Path) -> Registry:
    """Import the project's code and return the filled registry.

    Args:
        path: A project directory, its ``src``, or one ``.py`` file.

    Raises:
        ProjectLoadError: There is no code, it does not import, or it registers nothing; the
            message carries the traceback, without this module's own frames.
    """
    target = Path(path).resolve()
    compat.install()
    if target.is_file() and target.suffix == ".py":
        root, files = target.parent, [target]
    elif target.is_dir():
        root = target / "src" if (target / "src").is_dir() else target
        files = _module_files(root)
    else:
        raise ProjectLoadError(f"{path}: no such project directory or .py file")
    if not files:
        raise ProjectLoadError(f"{root}: no Python files to load")
    if str(root) not in sys.path:
        # It stays: tools may import their helpers when they are called.
        sys.path.insert(0, str(root))
    package = ""
    if target != files[0] and imports_beyond(root, files):
        with _told(root / "__init__.py"):
            package = f"{make_package(root)}."
    for file in files:
        _import(root, file, package)
    registry = get_registry()
    try:
        registry.compile()
    except TypeError as exc:
        raise ProjectLoadError(f"{root}: {exc}") from exc
    if not (registry.tools or registry.rewards or registry.functions):
        names = ", ".join(file.name for file in files[:5])
        raise ProjectLoadError(
            f"{root}: its code ({names}) registers no tool, reward or function; "
            "decorate a function with @register_tool"
        )
    return registry


def _module_files(root: Path) -> list[Path]:
    """Return the modules to import: those of the root, and every package below it."""
    files = [f for f in sorted(root.glob("*.py")) if not _is_skipped(f)]
    for directory in sorted(p for p in root.iterdir() if p.is_dir()):
        if directory.name in _SKIPPED_DIRECTORIES or directory.name.startswith((".", "_")):
            continue
        files += _package_files(directory)
    return files


def _package_files(directory: Path) -> list[Path]:
    """Return a directory's modules; one without ``__init__.py`` counts too, as in Python."""
    files: list[Path] = []
    for entry in sorted(directory.iterdir()):
        if entry.is_dir():
            if entry.name not in _SKIPPED_DIRECTORIES and not entry.name.startswith((".", "_")):
                files += _package_files(entry)
        elif entry.suffix == ".py" and not _is_skipped(entry):
            files.append(entry)
    return files


def _is_skipped(file: Path) -> bool:
    name = file.name
    return name.startswith(("_", "test_")) or name.endswith("_test.py") or name == "conftest.py"


def _module_name(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts)


def _import(root: Path, file: Path, package: str) -> None:
    name = package + _module_name(root, file)
    known = sys.modules.get(name)
    if known is not None and _is_module_of(known, file):
        return
    with _told(file):
        if known is not None or (not name.isidentifier() and "." not in name):
            # The name is taken by another module (`json.py`), or is no identifier (`my-env.py`).
            _import_as(f"aenv_project_{file.stem.replace('-', '_')}", file)
        else:
            importlib.import_module(name)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Raise whatever a module of the project raises as a failure to load it."""
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        raise ProjectLoadError(
            f"{file.name} does not load: {type(exc).__name__}: {exc}\n{_own_traceback(exc)}"
        ) from exc


def _is_module_of(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == file


def _import_as(name: str, file: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _own_traceback(exc: BaseException) -> str:
    """Return the traceback from the project's first frame on."""
    frames = traceback.extract_tb(exc.__traceback__)
    shown = [
        frame for frame in frames
        if not frame.filename.startswith(_OURS) and "importlib" not in frame.filename
    ]  # fmt: skip
    lines = traceback.format_list(shown) + traceback.format_exception_only(exc)
    return "".join(lines).rstrip()
