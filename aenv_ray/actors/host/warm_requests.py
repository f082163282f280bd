"""What a host was asked to keep warm, in a file that a restarted host reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aenv_ray.files import write_atomically
from aenv_ray.models import InstanceSpec

logger = logging.getLogger(__name__)


class WarmRequest(BaseModel):
    """A request to one host to keep sandboxes ready."""

    model_config = ConfigDict(frozen=True)

    spec: InstanceSpec
    """The template of the sandboxes; the request ends with its `job_id`."""
    count: int = Field(ge=0)
    idle_timeout_s: float
    """The sandboxes are ended once nobody has created one for this long."""


_REQUESTS = TypeAdapter(list[WarmRequest])


class WarmRequestFile:
    """The requests of one host.

    Without a path, requests end with this process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def save(self, requests: Sequence[WarmRequest]) -> None:
        """Replace the saved requests atomically."""
        if self._path is None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._path, _REQUESTS.dump_json(list(requests)))  # may contain secrets

    def load(self) -> list[WarmRequest]:
        """Return the saved requests; none if they cannot be read."""
        if self._path is None or not self._path.exists():
            return []
        try:
            return _REQUESTS.validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as exc:
            # Another version may have written it. Pools only save time, and are requested again.
            logger.warning("ignoring unreadable warm pool requests: %s", type(exc).__name__)
            return []
