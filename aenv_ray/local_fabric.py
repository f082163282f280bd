"""What ``aenv up`` wrote down about the fabric that it brought up on this machine.

The file is there from before the first process starts until after the last one has ended, so that
``aenv down`` finds everything, whatever was killed in between.
"""

from __future__ import annotations

import os
import socket
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.errors import ConfigError

FILE_NAME: Final = "up.json"
MARK: Final = "AENV_UP_ID"
"""Environment variable by which every process of a fabric is known; they all inherit it."""
_CONNECT_S: Final = 2.0


class Phase(StrEnum):
    """How far a fabric is."""

    STARTING = "starting"
    """Some of it may run; whoever finds it so, and no ``aenv up`` at work, takes it down."""
    UP = "up"
    """All of it was seen running."""


class LocalFabric(BaseModel):
    """One fabric of this machine: where it is, what is its own, and how to speak to it."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Value of `MARK` in its processes."""
    phase: Phase
    url: str
    """Of the gateway's control side."""
    mcp_url: str
    """Of the gateway's data side."""
    token: str = Field(default="", repr=False)
    """An admin's token."""
    ray_address: str = ""
    """Empty until Ray runs."""
    owns_ray: bool
    """Whether Ray was started for it, and ends with it."""
    ray_temp_dir: Path | None = None
    """Of a Ray of its own."""
    sessions: frozenset[int] = frozenset()
    """Of the operating system, in which the processes of its Ray are, whatever they are called."""
    node_dir: Path | None = None
    """Of its node's launcher; None until Ray runs, or where Ray is not its own."""
    started_at: float
    """Seconds since the epoch."""
    user: str
    """Who started it."""

    def ray_answers(self) -> bool:
        """Return whether something listens at its Ray's address."""
        host, _, port = self.ray_address.rpartition(":")
        if not (host and port.isdecimal()):
            return False
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
                return True
        except OSError:
            return False


def path_in(data_dir: Path) -> Path:
    """Return where the file is."""
    return data_dir / FILE_NAME


def read(data_dir: Path) -> LocalFabric | None:
    """Return what is written down; None: no fabric was brought up here.

    Raises:
        ConfigError: The file cannot be read, or is none of ours.
    """
    path = path_in(data_dir)
    try:
        return LocalFabric.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        what = exc.strerror if isinstance(exc, OSError) else "it is not what `aenv up` writes"
        raise ConfigError(f"{path} cannot be read: {what}", hint=f"remove it: rm {path}") from None


def write(data_dir: Path, fabric: LocalFabric) -> None:
    """Write it down: whole or not at all, and for this user alone, since it holds a token.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_private(path_in(data_dir), fabric.model_dump_json(indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file, or what a link leads to, with one of mode 0600 in a single step.

    Raises:
        ConfigError: It cannot be written; what was there is unchanged.
    """
    try:
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def forget(data_dir: Path) -> None:
    """Remove the file; nothing when there is none."""
    path_in(data_dir).unlink(missing_ok=True)
