"""What a host was asked to keep ready, in a file: a restarted host goes on with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aenv_ray.models import InstanceSpec

logger = logging.getLogger(__name__)


class WarmRequest(BaseModel):
    """Sandboxes that one host is asked to keep ready."""

    model_config = ConfigDict(frozen=True)

    spec: InstanceSpec
    """What they are made like; its `job_id` is the job with which the request ends."""
    count: int = Field(ge=0)
    idle_timeout_s: float
    """They are kept no longer once nobody created one for so long."""


_REQUESTS = TypeAdapter(list[WarmRequest])


class WarmRequestFile:
    """The requests of one host.

    Args:
        path: Its file; the directory is made when missing. None: nothing outlives this process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def save(self, requests: Sequence[WarmRequest]) -> None:
        """Write the requests, whole or not at all."""
        if self._path is None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}")
        partial.touch(mode=0o600)  # variables may be secrets
        partial.write_bytes(_REQUESTS.dump_json(list(requests)))
        os.replace(partial, self._path)

    def load(self) -> list[WarmRequest]:
        """Return the requests that were saved; none when they cannot be read."""
        if self._path is None or not self._path.exists():
            return []
        try:
            return _REQUESTS.validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as exc:
            # For example of another version: pools are a matter of speed, and are asked for again.
            logger.warning(
                "what was to be kept ready is not known any more: %s", type(exc).__name__
            )
            return []
