"""The environment's modules, imported from a project that is assembled with the stand-in."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from aenv_ray.config import settings
from aenv_ray.project import project
from aenv_ray.runtime import get_registry
from aenv_ray.runtime.door.host.link import HostLink

STAND_IN = Path(__file__).parents[3] / "fixtures" / "tau2_bench"


@pytest.fixture(scope="module")
def tau2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the environment's main module; all that importing it changed is undone."""
    registry, variables, modules = get_registry(), dict(os.environ), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        # Tests of doors leave theirs open, and nobody answers there.
        patch.setattr("aenv_ray.runtime.door.chat_model.HOST", HostLink())
        patch.setenv("AENV_TAU2", str(STAND_IN))
        patch.setenv("AENV_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        settings.cache_clear()
        path = list(sys.path)
        sys.path.insert(0, str(project.resolve("tau2").path / "src"))
        yield importlib.import_module("tau2_environment")
        sys.path[:] = path
    os.environ.clear()
    os.environ.update(variables)
    settings.cache_clear()
    registry.clear()
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/assembled/" in file or name.partition(".")[0] == "litellm":
            del sys.modules[name]
