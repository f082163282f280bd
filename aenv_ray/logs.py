"""Logs as JSON lines, with the instance, episode and owner that each line is about."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from aenv_ray.config import settings

events: Final = logging.getLogger("aenv_ray.events")
"""Creates and ends of instances, and ends of episodes; written as JSON only, for they are many."""
events.setLevel(logging.WARNING)
FIELDS: Final = ("instance", "episode", "task", "owner")
"""What a line may be about, besides its message."""
_NOTHING: Final[Mapping[str, Any]] = {}
_about: ContextVar[Mapping[str, Any]] = ContextVar("aenv_ray_log_fields", default=_NOTHING)


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add fields to all lines that are logged in the block, also by other tasks that it starts.

    Args:
        fields: Some of `FIELDS`; None leaves one out.
    """
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def of_instance(instance: str, owner: str | None = None) -> dict[str, Any]:
    """Return the ``extra`` of a line about an instance.

    Args:
        instance: Its id.
        owner: Its owner; None if it has none, or if the caller does not know it, as in an engine.
    """
    return {"instance": instance, "owner": owner}


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object in one line.

    Args:
        component: What logs: ``host``, ``controller`` …
    """

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        own = {name: getattr(record, name, None) for name in FIELDS}
        line |= {k: v for k, v in [*_about.get().items(), *own.items()] if v is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(component: str) -> None:
    """Write the logs of a process of the fabric to standard error, if the settings say JSON.

    Otherwise nothing changes: warnings go to standard error as text. Ray stores standard error.

    Args:
        component: What this process is.
    """
    if settings().log_format != "json":
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(component))
    ours = logging.getLogger("aenv_ray")
    ours.handlers = [handler]
    ours.setLevel(logging.INFO)
    ours.propagate = False
    events.setLevel(logging.INFO)
