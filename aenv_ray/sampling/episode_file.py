"""The file that gets one JSON line for each finished episode."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.episode import Episode

logger = logging.getLogger("aenv_ray")


class EpisodeFile:
    """Takes episodes until a write fails; that ends the writing, not the run that makes them.

    Args:
        path: Replaced when it exists.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.failure: ConfigError | None = None
        """Why not every episode is in the file; None while every one is."""
        self._path = path
        self._written = 0
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be written: {exc.strerror}", hint="name another file"
            ) from exc

    def write(self, episode: Episode) -> None:
        """Append an episode; nothing once a write has failed. The first failure is logged."""
        if self.failure is not None:
            return
        try:
            self._file.write(episode.model_dump_json() + "\n")
            self._file.flush()
            self._written += 1
        except OSError as exc:
            self.failure = self._failed(exc)
            logger.warning("%s; the run goes on", self.failure.message)

    def close(self) -> None:
        """Close it, any number of times; what cannot be written even now is a failure."""
        try:
            self._file.close()
        except OSError as exc:
            self.failure = self.failure or self._failed(exc)
            with contextlib.suppress(OSError):  # the second attempt drops what is buffered
                self._file.close()

    def _failed(self, exc: OSError) -> ConfigError:
        return ConfigError(
            f"{self._path} cannot be written: {exc.strerror}; it has {self._written} episodes",
            hint="make room or name another file; the sampling's episodes and summary() are whole",
        )
