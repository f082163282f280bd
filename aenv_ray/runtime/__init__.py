"""The island inside the sandbox: decorators, registry, loader and the two doors.

Environment code imports its decorators from here (or from ``aenv``, which the runtime resolves to
the same names). Nothing in this package imports Ray, Redis, Docker or the rest of aenv-ray, so it
runs alone in an image or a virtual environment that has only pydantic.
"""

from aenv_ray.runtime.calls import current_call
from aenv_ray.runtime.decorators import (
    register_function,
    register_health,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.registry import Registry, get_registry
from aenv_ray.runtime.results import Image

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
