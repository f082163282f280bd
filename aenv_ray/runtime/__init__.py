"""What runs inside a sandbox: decorators, registry, loader and the two doors.

The code of an environment imports its decorators from here, or from ``aenv``, which the runtime
resolves to the same names. Nothing in this package imports Ray, Redis, Docker or other packages of
aenv-ray: it runs in an image or virtual environment that has only pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv_ray.runtime.api.decorators import (
        register_function,
        register_health,
        register_prompt,
        register_reset,
        register_resource,
        register_reward,
        register_tasks,
        register_tool,
    )
    from aenv_ray.runtime.api.registry import Registry, get_registry
    from aenv_ray.runtime.api.results import Audio, EmbeddedResource, Image, PromptMessage
    from aenv_ray.runtime.door.agent import ChatEndpoint, serve_agent
    from aenv_ray.runtime.door.calls import current_call
    from aenv_ray.runtime.door.subscriptions import resource_updated

_HOMES = {
    "Audio": "api.results",
    "ChatEndpoint": "door.agent",
    "EmbeddedResource": "api.results",
    "Image": "api.results",
    "PromptMessage": "api.results",
    "Registry": "api.registry",
    "current_call": "door.calls",
    "get_registry": "api.registry",
    "register_function": "api.decorators",
    "register_health": "api.decorators",
    "register_prompt": "api.decorators",
    "register_reset": "api.decorators",
    "register_resource": "api.decorators",
    "register_reward": "api.decorators",
    "register_tasks": "api.decorators",
    "register_tool": "api.decorators",
    "resource_updated": "door.subscriptions",
    "serve_agent": "door.agent",
}

__all__ = [
    "Audio",
    "ChatEndpoint",
    "EmbeddedResource",
    "Image",
    "PromptMessage",
    "Registry",
    "current_call",
    "get_registry",
    "register_function",
    "register_health",
    "register_prompt",
    "register_reset",
    "register_resource",
    "register_reward",
    "register_tasks",
    "register_tool",
    "resource_updated",
    "serve_agent",
]


def __getattr__(name: str) -> Any:
    # Loaded on demand. `second` is the name that published projects use.
    if name in {"sidecar", "second"}:
        return importlib.import_module("aenv_ray.runtime.container.sidecar")
    if name == "chat_model":
        return importlib.import_module("aenv_ray.runtime.door.chat_model")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"aenv_ray.runtime.{home}"), name)
