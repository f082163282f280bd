"""Resolves references: a project's directory, a built-in or a published environment.

Only published environments need the hub, so it is imported only for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aenv_ray.errors import EnvironmentNotFound
from aenv_ray.project import project
from aenv_ray.project.project import Project


def resolve_environment(reference: str | Path, connect: Callable[[], Any]) -> Project:
    """Return the project that a reference names; blocks.

    Args:
        reference: As in `aenv_ray.project.project.resolve`, or ``name`` or ``name@version`` of a
            published environment.
        connect: Connects to the fabric; called only for published environments.

    Raises:
        EnvironmentNotFound: The environment, version or directory does not exist.
        CatalogConflict: The version is Failed.
        ConfigError: The reference or the project's config is malformed.
        FabricUnavailable: The hub or the artifact store does not answer.
    """
    try:
        return project.resolve(reference)
    except EnvironmentNotFound as exc:
        if isinstance(reference, Path) or project.looks_like_path(reference):
            raise
        from aenv_ray.actors.fabric.catalog import published

        return published(reference, connect, exc)
