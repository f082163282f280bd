"""Several copies of a project's modules in one process, each with its own state and registry.

`sys.modules` belongs to the process, but the fake engine runs many environments in one process. A
`ModuleSpace` puts its modules into `sys.modules` while its project imports something, at load and
later, and then removes them.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from aenv_ray.runtime.api.loader import BareNames, load_project
from aenv_ray.runtime.api.registry import Registry, registering_in
from aenv_ray.runtime.api.signature import Signature

_lock = threading.RLock()
"""Held while the modules of one space are in `sys.modules`, so only one project imports at a
time."""
_entered: list[ModuleSpace] = []
_codes: dict[tuple[str, int, int], CodeType] = {}
"""Compiled sources by path, time and size, because the project directory has no bytecode cache."""
_checked: set[frozenset[tuple[str, int, int]]] = set()
"""Sets of sources whose signatures were checked."""
_signatures: dict[tuple[Any, ...], Signature] = {}
"""Signatures that all copies of a function share: making one takes a millisecond."""
_SIMPLE_TYPES: Final = (bool, int, float, str)
"""Types of which no copy of a module has its own."""


class ModuleSpace:
    """The modules of one environment."""

    def __init__(self, project_dir: Path) -> None:
        self._project_dir = project_dir
        source = project_dir / "src"
        self._root = str(source if source.is_dir() else project_dir)
        entries = os.listdir(self._root) if os.path.isdir(self._root) else ()
        self._names = {entry.removesuffix(".py") for entry in entries}
        self._modules: dict[str, ModuleType] = {}
        self._sources: set[tuple[str, int, int]] = set()
        self._finders: list[MetaPathFinder] = [_Finder(self)]
        self.builtins = {**vars(builtins), "__import__": self._import}
        """The built-ins of these modules, with an ``__import__`` that enters this space."""

    def load(self) -> Registry:
        """Import the project and return what it registered.

        Raises:
            ProjectLoadError: As `load_project`.
        """
        registry = _SpaceRegistry()
        registry.space = self
        with registering_in(registry), self._entered():
            return load_project(self._project_dir)

    def compile_once(self, registry: _SpaceRegistry) -> None:
        """Check the signatures of these sources, unless an earlier copy was checked."""
        for entry in registry.entries():
            key = _key_of_signature(entry.function)
            if key in _signatures:
                vars(entry)["signature"] = _signatures[key]  # where `cached_property` keeps it
            elif key:
                _signatures[key] = entry.signature
        sources = frozenset(self._sources)
        if sources not in _checked:
            Registry.compile(registry)
            _checked.add(sources)

    # --- importing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Put this space's modules into `sys.modules` for a block."""
        with _lock:
            if _entered and _entered[-1] is self:
                yield
                return
            hidden = self._hide_namesakes()
            sys.modules.update(self._modules)
            last, path = next(reversed(sys.modules)), list(sys.path)
            writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
            others = list(sys.meta_path)
            sys.meta_path[:0] = self._finders
            _entered.append(self)
            try:
                yield
            finally:
                _entered.pop()
                bare = [f for f in sys.meta_path if isinstance(f, BareNames) and f not in others]
                self._finders = [*bare, self._finders[-1]]
                sys.meta_path[:] = [f for f in sys.meta_path if f not in self._finders]
                sys.dont_write_bytecode = writes_bytecode
                sys.path[:] = path
                # New ones are at the end. If the previously last one is gone, all are scanned.
                new = itertools.takewhile(lambda name: name != last, reversed(sys.modules))
                self._modules |= {n: sys.modules[n] for n in new if self._owns(sys.modules[n])}
                for name in self._modules:
                    sys.modules.pop(name, None)
                sys.modules.update(hidden)

    def _hide_namesakes(self) -> dict[str, ModuleType]:
        """Remove modules from `sys.modules` that would shadow the project's, and return them."""
        taken = {name for name in self._names if name in sys.modules and _may_be_hidden(name)}
        names = [n for n in list(sys.modules) if n.partition(".")[0] in taken] if taken else []
        return {name: sys.modules.pop(name) for name in names}

    def _owns(self, module: ModuleType) -> bool:
        origin = getattr(module, "__file__", None)
        paths = [origin] if origin else list(getattr(module, "__path__", ()))
        return bool(paths) and self._is_below_root(paths[0])

    def _is_below_root(self, path: str) -> bool:
        return path == self._root or path.startswith(f"{self._root}/")

    def find(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return the spec of a module of this project; None for others."""
        paths = [self._root] if path is None else list(path)
        if not all(map(self._is_below_root, paths)):
            return None
        spec = PathFinder.find_spec(name, paths)
        if spec is None and name.partition(".")[0] in self._names:
            # The finder's directory listing does not notice changes within a clock tick.
            PathFinder.invalidate_caches()
            spec = PathFinder.find_spec(name, paths)
        # Also subclasses: importing FastMCP's client installs beartype's before Python's own.
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _SpaceLoader(name, spec.loader.path, self)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # named as in `__import__`
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 0 and name.partition(".")[0] not in self._names:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        with self._entered():
            return builtins.__import__(name, globals, locals, fromlist or (), level)

    def code(self, path: str, loader: SourceFileLoader, name: str) -> CodeType | None:
        """Return the compiled source, shared by all copies of a module."""
        status = Path(path).stat()
        key = (path, status.st_mtime_ns, status.st_size)
        self._sources.add(key)
        if key not in _codes:
            code = SourceFileLoader.get_code(loader, name)
            if code is None:
                return None
            _codes[key] = code
        return _codes[key]


def _may_be_hidden(name: str) -> bool:
    return name not in sys.stdlib_module_names and not name.startswith(("pydantic", "aenv"))


def _key_of_signature(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return what copies of a function have in common; empty if their signatures may differ."""
    if not isinstance(function, FunctionType) or vars(function):  # such as `__wrapped__`
        return ()
    own_names = function.__globals__
    simple = {one.__name__: one for one in _SIMPLE_TYPES if one.__name__ not in own_names}
    types = [
        simple.get(one, one) if isinstance(one, str) else one
        for name, one in function.__annotations__.items()
        if name != "return"
    ]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(one in _SIMPLE_TYPES for one in types):
        return ()
    if not all(one is None or type(one) in _SIMPLE_TYPES for one in defaults):
        return ()
    return function.__code__, function.__doc__, *types, *map(repr, defaults)


class _SpaceRegistry(Registry):
    """A registry that skips checks which an earlier copy of the same sources passed."""

    space: ModuleSpace

    def compile(self) -> None:
        self.space.compile_once(self)


class _Finder(MetaPathFinder):
    """Finds the modules of a space; first in `sys.meta_path`."""

    def __init__(self, space: ModuleSpace) -> None:
        self._space = space

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        return self._space.find(fullname, path)


class _SpaceLoader(SourceFileLoader):
    """Runs a module's source with the built-ins of its space."""

    def __init__(self, fullname: str, path: str, space: ModuleSpace) -> None:
        super().__init__(fullname, path)
        self._space = space

    def get_code(self, fullname: str) -> CodeType | None:
        return self._space.code(self.path, self, fullname)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._space.builtins
        super().exec_module(module)
