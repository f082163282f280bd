"""The record of the fabric that ``aenv up`` started on this machine.

The file exists from before the first process starts until after the last one has ended, so that
``aenv down`` finds every process, even if ``aenv up`` was killed.
"""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aenv_ray.errors import ConfigError
from aenv_ray.files import make_private, write_atomically

FILE_NAME: Final = "up.json"
MARK: Final = "AENV_UP_ID"
"""Environment variable that identifies the processes of a fabric; they all inherit it."""
_CONNECT_S: Final = 2.0


class Phase(StrEnum):
    """State of a local fabric."""

    STARTING = "starting"
    """Some processes may run. If no ``aenv up`` is running, it failed and is to be taken down."""
    UP = "up"
    """Everything was running once."""


class LocalFabric(BaseModel):
    """A fabric on this machine: addresses, token, and the processes that belong to it."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Value of the variable `MARK` in its processes."""
    phase: Phase
    url: str
    """Address of the gateway's REST API."""
    mcp_url: str
    """Address of the gateway's MCP side."""
    token: str = Field(default="", repr=False)
    """A token with role admin."""
    ray_address: str = ""
    """Empty until Ray runs."""
    owns_ray: bool
    """Whether Ray was started for the fabric and ends with it."""
    ray_temp_dir: Path | None = None
    """Temporary directory of its own Ray; None if Ray is not its own."""
    sessions: frozenset[int] = frozenset()
    """Operating system sessions of its Ray's processes, which may hide their environment."""
    node_dir: Path | None = None
    """Directory of the node's launcher; None until Ray runs, or if Ray is not its own."""
    started_at: float
    """Seconds since the epoch."""
    user: str
    """The user who started it."""

    def is_broken(self) -> bool:
        """Return whether its start failed half-way, or its Ray does not answer any more."""
        return self.phase is not Phase.UP or not self.ray_answers()

    def ray_answers(self) -> bool:
        """Return whether something listens at the Ray address."""
        host, _, port = self.ray_address.rpartition(":")
        if not (host and port.isdecimal()):
            return False
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
                return True
        except OSError:
            return False


def path_in(data_dir: Path) -> Path:
    """Return the path of the record."""
    return data_dir / FILE_NAME


def read(data_dir: Path) -> LocalFabric | None:
    """Return the record; None if no fabric was started here.

    Raises:
        ConfigError: The file cannot be read or is not a record.
    """
    path = path_in(data_dir)
    try:
        return LocalFabric.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        what = exc.strerror if isinstance(exc, OSError) else "its content is not from `aenv up`"
        raise ConfigError(f"{path} cannot be read: {what}", hint=f"remove it: rm {path}") from None


def write(data_dir: Path, fabric: LocalFabric) -> None:
    """Replace the record atomically; readable only by this user, since it holds a token.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_private(path_in(data_dir), fabric.model_dump_json(indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically with one of mode 0600; a symlink is followed.

    Raises:
        ConfigError: The file cannot be written; it is unchanged.
    """
    try:
        path = path.resolve()
        make_private(path.parent)
        write_atomically(path, text, durable=True)
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written: {exc.strerror}", hint="make its directory writable for you"
        ) from exc


def forget(data_dir: Path) -> None:
    """Remove the record, if there is one."""
    path_in(data_dir).unlink(missing_ok=True)
