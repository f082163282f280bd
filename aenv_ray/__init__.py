"""aenv-ray: a Ray-native fabric of environments for agentic reinforcement learning.

    import aenv_ray

    env = aenv_ray.create("mini-terminal@1.0.0", ttl="30m")
    result = ray.get(env.call_tool.remote("execute_command", {"command": "uname"}))

Importing this package loads neither Ray nor FastMCP; each name below is loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv_ray.actors.calls.handle import EnvHandle
    from aenv_ray.actors.fabric.driver_api import (
        create,
        create_many,
        get,
        init,
        list_instances,
        release_many,
        shutdown,
    )
    from aenv_ray.actors.fabric.warm_api import warm
    from aenv_ray.client import Environment, SyncEnvironment
    from aenv_ray.client.vector import vector
    from aenv_ray.errors import AenvError
    from aenv_ray.integrations.agents import agent_env
    from aenv_ray.models import ToolResult
    from aenv_ray.sampling import sample

__version__ = "0.1.0"

_HOMES = {
    "AenvError": "aenv_ray.errors",
    "EnvHandle": "aenv_ray.actors.calls.handle",
    "Environment": "aenv_ray.client",
    "SyncEnvironment": "aenv_ray.client",
    "ToolResult": "aenv_ray.models",
    "agent_env": "aenv_ray.integrations.agents",
    "create": "aenv_ray.actors.fabric.driver_api",
    "create_many": "aenv_ray.actors.fabric.driver_api",
    "get": "aenv_ray.actors.fabric.driver_api",
    "init": "aenv_ray.actors.fabric.driver_api",
    "list_instances": "aenv_ray.actors.fabric.driver_api",
    "release_many": "aenv_ray.actors.fabric.driver_api",
    "sample": "aenv_ray.sampling",
    "shutdown": "aenv_ray.actors.fabric.driver_api",
    "vector": "aenv_ray.client.vector",
    "warm": "aenv_ray.actors.fabric.warm_api",
}

__all__ = [
    "AenvError",
    "EnvHandle",
    "Environment",
    "SyncEnvironment",
    "ToolResult",
    "agent_env",
    "create",
    "create_many",
    "get",
    "init",
    "list_instances",
    "release_many",
    "sample",
    "shutdown",
    "vector",
    "warm",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
