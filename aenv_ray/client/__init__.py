"""The client: `Environment` and its sync facade, over Ray or over HTTP.

Names are loaded when first used, so that a client of an HTTP server does not load Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv_ray.client.circuit import CircuitBreaker
    from aenv_ray.client.environment import Environment
    from aenv_ray.client.openai_names import openai_name
    from aenv_ray.client.sync import SyncEnvironment

_HOMES = {
    "CircuitBreaker": "aenv_ray.client.circuit",
    "Environment": "aenv_ray.client.environment",
    "SyncEnvironment": "aenv_ray.client.sync",
    "openai_name": "aenv_ray.client.openai_names",
}

__all__ = ["CircuitBreaker", "Environment", "SyncEnvironment", "openai_name"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
