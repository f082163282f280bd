"""Makes ``aenv`` resolve to this runtime, so that AEnvironment's environments load unmodified.

Names and module paths are those of the ``aenvironment`` package that environment code uses. They
are ours even if that package is installed: its decorators need its own server, which does not run
here.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from aenv_ray.runtime.api.decorators import (
    register_function,
    register_health,
    register_reward,
    register_tool,
)
from aenv_ray.runtime.api.registry import Registered, Registry, get_registry


def install() -> None:
    """Put ``aenv`` and its submodules into `sys.modules`. Idempotent."""
    if getattr(sys.modules.get("aenv"), "__aenv_ray__", False):
        return
    root = _module("aenv", _DECORATORS | _CLASSES)
    root.__path__ = []
    core = _module("aenv.core", _DECORATORS | _CLASSES)
    core.__path__ = []
    server = _module("aenv.server", {})
    server.__path__ = []
    _module("aenv.core.tool", _DECORATORS | _CLASSES)
    _module("aenv.core.function_registry", _DECORATORS | {"get_function_registry": get_registry})
    _module("aenv.core.exceptions", _CLASSES)
    _module("aenv.core.logging", {"getLogger": _get_logger, "setup_logging": _setup_logging})
    root.setup_logging = _setup_logging  # type: ignore[attr-defined]  # modules are open
    root.__getattr__ = _client_name  # type: ignore[method-assign]  # PEP 562, set from outside


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "AEnvironment's names, served by the aenv-ray runtime.")
    module.__dict__.update(names, __aenv_ray__=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


class AEnvError(Exception):
    """Base of AEnvironment's errors, for environment code that raises them."""

    def __init__(self, message: str = "", details: Any = None, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.context = context


# The trailing underscore: `errors.ToolError` and a built-in have these names.


class ToolError_(AEnvError):
    """A tool failed."""


class EnvironmentError_(AEnvError):
    """The environment failed."""


class UnrecoverableEnvironmentError(EnvironmentError_):
    """The environment failed for good."""


def _client_name(name: str) -> Any:
    """Return a client class, if the client is installed too."""
    if name in ("Environment", "ToolResult"):
        return getattr(importlib.import_module("aenv_ray"), name)
    raise AttributeError(f"module 'aenv' has no attribute {name!r}")


def _get_logger(name: str = "aenv", type_: str | None = None) -> logging.Logger:
    del type_
    return logging.getLogger(name if name.startswith("aenv") else f"aenv.{name}")


def _setup_logging(handler: logging.Handler | None = None, level: int = logging.INFO) -> None:
    logger = logging.getLogger("aenv")
    logger.handlers[:] = [handler] if handler else []
    logger.setLevel(level)


_DECORATORS: dict[str, Any] = {
    "get_registry": get_registry,
    "register_function": register_function,
    "register_health": register_health,
    "register_reward": register_reward,
    "register_tool": register_tool,
}
_CLASSES: dict[str, Any] = {
    "AEnvError": AEnvError,
    "EnvironmentError": EnvironmentError_,
    "Tool": Registered,
    "ToolError": ToolError_,
    "ToolRegistry": Registry,
    "UnrecoverableEnvironmentError": UnrecoverableEnvironmentError,
}
