"""Pickling of user code that is sent to other processes of the cluster: Ray's cloudpickle."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ray import cloudpickle

_REGISTERING: Final = threading.Lock()


def pickled(value: Any) -> bytes:
    """Return `value` pickled, including the code of its module unless that module is installed.

    Raises:
        Exception: It cannot be pickled; this is whatever its own code raises.
    """
    with _REGISTERING, _by_value(_module_of(value)):
        return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def unpickled(data: bytes) -> Any:
    """Return what `pickled` was given. Only for data from this process's own Ray job.

    Raises:
        Exception: A module is missing in this process, or the value's code raises.
    """
    return cloudpickle.loads(data)


def _module_of(value: Any) -> ModuleType | None:
    """Return the module that defines a function, a class, or the class of an instance."""
    while isinstance(value, functools.partial):
        value = value.func
    return sys.modules.get(getattr(value, "__module__", None) or "")


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Pickle what `module` defines by value, since other nodes may not have its file."""
    if module is None or _is_installed(module):
        yield
        return
    known = cloudpickle.list_registry_pickle_by_value()  # type: ignore[no-untyped-call]
    if module.__name__ in known:  # registered by the user
        yield
        return
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _is_installed(module: ModuleType) -> bool:
    """Whether a module belongs to Python, to aenv-ray or to an installed package."""
    top = module.__name__.partition(".")[0]
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # built in
    directories = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return any(Path(one) in Path(file).parents for one in directories)
