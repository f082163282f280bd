"""Ray Data: datasets from data in this process."""

from __future__ import annotations

from typing import Any

from aenv_ray.errors import ConfigError


def from_arrow(table: Any) -> Any:
    """Return a ``ray.data.Dataset`` of an Arrow table.

    Raises:
        ConfigError: Ray Data cannot be imported.
    """
    try:
        import ray.data
    except ImportError as exc:
        raise ConfigError(
            f"to_ray() requires Ray Data, which cannot be imported: {exc}",
            hint="pip install 'aenv-ray[data]'",
        ) from exc
    return ray.data.from_arrow(table)
