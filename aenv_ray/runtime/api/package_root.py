"""A project whose code directory is a package: its modules import each other relatively.

``from .helper import …`` in ``src/tools.py`` means ``src/helper.py`` only where ``src`` is the
parent package, so its modules are then ``src.tools`` and ``src.helper``. What imports them by their
bare names, as other projects do, gets the same modules.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

_OTHER: Final = "aenv_project"
"""The package's name where the directory's own is none, or taken."""


def imports_beyond(root: Path, files: Sequence[Path]) -> bool:
    """Whether a module imports relatively from the root itself, which must be a package then."""
    if not (root / "__init__.py").is_file():
        return False
    return any(_deepest_level(file) >= len(file.relative_to(root).parts) for file in files)


def _deepest_level(file: Path) -> int:
    """Return how many directories up a module's farthest relative import reaches; 0: none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return 0  # its import says why
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return max((node.level for node in nodes), default=0)


def make_package(root: Path) -> str:
    """Import a directory as a package and return its name.

    Raises:
        BaseException: What its ``__init__.py`` raised.
    """
    name = root.name if root.name.isidentifier() and root.name not in sys.modules else _OTHER
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
    """Gives the package's modules to whoever imports them without its name.

    Args:
        root: The package's directory.
        package: Its name.
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
        return importlib.util.spec_from_loader(fullname, _Same(f"{self._package}.{fullname}"))


class _Same(Loader):
    """Loads nothing: the module is there under another name."""

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
        module.__spec__ = self._spec  # the import system put that of the bare name there
