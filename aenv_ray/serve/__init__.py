"""Ray Serve applications: the gateway, for clients outside the cluster, and services."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv_ray.serve.services.python_api import deploy, remove, state

__all__ = ["deploy", "remove", "state"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("aenv_ray.serve.services.python_api"), name)
