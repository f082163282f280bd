"""Imports the code of a project, which registers its tools, rewards and functions.

A project directory holds ``src/*.py`` and packages below it, or the files directly. Each module is
imported once under its ordinary name, so that modules can import each other and dataclasses,
pickling and ``inspect`` work. A failure is raised with its traceback: an environment without any
tools is never healthy.

The code directory can be a package itself: ``from .helper import …`` in ``src/tools.py`` means
``src/helper.py`` only if ``src`` is the parent package. The modules are then ``src.tools`` and
``src.helper``, and importing them by their bare names gives the same modules.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

from aenv_ray.runtime.api import compat
from aenv_ray.runtime.api.registry import Registry, get_registry
from aenv_ray.runtime.faults import ProjectLoadError

_SKIPPED_DIRECTORIES: Final = frozenset(
    {"tests", "test", "__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
)

_FALLBACK_PACKAGE: Final = "aenv_project"
"""Name of the package if the directory's own is not an identifier, or is taken."""
_OURS: Final = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("runtime", "engines"))


def load_project(path: str | Path) -> Registry:
    """Import the project's code and return the filled registry.

    Args:
        path: A project directory, its ``src``, or one ``.py`` file.

    Raises:
        ProjectLoadError: There is no code, it does not import, or it registers nothing. The
            message contains the traceback, without the frames of the runtime.
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
        # Permanently: tools may import their helpers when they are called.
        sys.path.insert(0, str(root))
    package = ""
    if target != files[0] and _must_be_package(root, files):
        with _as_load_error(root / "__init__.py"):
            package = f"{_import_as_package(root)}."
    for file in files:
        _import(root, file, package)
    registry = get_registry()
    try:
        registry.compile()
        registry.note_state()
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
    """Return the modules to import: those in the root and in every package below it."""
    files = [f for f in sorted(root.glob("*.py")) if not _is_skipped(f)]
    for directory in sorted(p for p in root.iterdir() if p.is_dir()):
        if directory.name in _SKIPPED_DIRECTORIES or directory.name.startswith((".", "_")):
            continue
        files += _package_files(directory)
    return files


def _package_files(directory: Path) -> list[Path]:
    """Return the modules of a package, with or without ``__init__.py``."""
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
    with _as_load_error(file):
        if known is not None or (not name.isidentifier() and "." not in name):
            # The name belongs to another module (`json.py`) or is not an identifier (`my-env.py`).
            _import_as(f"aenv_project_{file.stem.replace('-', '_')}", file)
        else:
            importlib.import_module(name)


@contextmanager
def _as_load_error(file: Path) -> Iterator[None]:
    """Convert any exception of a module of the project to `ProjectLoadError`."""
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
    """Return the traceback without the frames of the runtime and of the import system."""
    frames = traceback.extract_tb(exc.__traceback__)
    shown = [
        frame for frame in frames
        if not frame.filename.startswith(_OURS) and "importlib" not in frame.filename
    ]  # fmt: skip
    lines = traceback.format_list(shown) + traceback.format_exception_only(exc)
    return "".join(lines).rstrip()


# --- a code directory that is a package -----------------------------------------------------------


def _must_be_package(root: Path, files: Sequence[Path]) -> bool:
    """Whether a module uses a relative import that starts at the root directory."""
    if not (root / "__init__.py").is_file():
        return False
    return any(_deepest_level(file) >= len(file.relative_to(root).parts) for file in files)


def _deepest_level(file: Path) -> int:
    """Return how many directories up a module's relative imports reach; 0 without any."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return 0  # importing it raises the error
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return max((node.level for node in nodes), default=0)


def _import_as_package(root: Path) -> str:
    """Import a directory as a package and return its name.

    Raises:
        BaseException: From its ``__init__.py``.
    """
    is_usable = root.name.isidentifier() and root.name not in sys.modules
    name = root.name if is_usable else _FALLBACK_PACKAGE
    spec = importlib.util.spec_from_file_location(
        name, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    sys.meta_path.insert(0, BareNames(root, name))
    spec.loader.exec_module(package)
    return name


class BareNames(MetaPathFinder):
    """Finds the modules of a package when they are imported without its name.

    Args:
        root: The package's directory.
        package: The package's name.
    """

    def __init__(self, root: Path, package: str) -> None:
        self._root = root
        self._package = package

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the package, else None."""
        del path, target
        top = self._root / fullname.partition(".")[0]
        if top.name in sys.stdlib_module_names or top.name == self._package:
            return None
        if not (top.is_dir() or top.with_name(f"{top.name}.py").is_file()):
            return None
        loader = _AliasLoader(f"{self._package}.{fullname}")
        return importlib.util.spec_from_loader(fullname, loader)


class _AliasLoader(Loader):
    """Returns a module that is importable under another name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself."""
        del spec
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""
        module.__spec__ = self._spec  # the import system had set that of the bare name
