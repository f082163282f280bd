"""The island inside the sandbox: decorators, registry, loader and the two doors.

Environment code imports its decorators from here (or from ``aenv``, which the runtime resolves to
the same names). Nothing in this package imports Ray, Redis, Docker or the rest of aenv-ray, so it
runs alone in an image or a virtual environment that has only pydantic.
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
    # Loaded only where there is a second container; `second` is what older projects call it.
    if name in {"sidecar", "second"}:
        return importlib.import_module("aenv_ray.runtime.container.sidecar")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
