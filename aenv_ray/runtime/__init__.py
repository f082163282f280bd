"""What runs inside a sandbox: decorators, registry, loader and the two doors.

The code of an environment imports its decorators from here, or from ``aenv``, which the runtime
resolves to the same names. Nothing in this package imports Ray, Redis, Docker or other packages of
aenv-ray: it runs in an image or virtual environment that has only pydantic.
"""

import importlib
from types import ModuleType

from aenv_ray.runtime.api.decorators import (
    register_function,
    register_health,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.api.registry import Registry, get_registry
from aenv_ray.runtime.api.results import Image
from aenv_ray.runtime.door.calls import current_call

__all__ = [
    "Image",
    "Registry",
    "current_call",
    "get_registry",
    "register_function",
    "register_health",
    "register_reward",
    "register_tool",
]


def __getattr__(name: str) -> ModuleType:
    # Loaded on demand. `second` is the name that published projects use.
    if name in {"sidecar", "second"}:
        return importlib.import_module("aenv_ray.runtime.container.sidecar")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
